// The native host: an interpreter of kgen/host/program.py, compiled once per machine.
//
// `create(spec)` turns the nested tuples that kgen/host/native.py makes of a Program into a `Runner`, a Python callable that
// takes the boxed list of inputs and returns the list of outputs. What can be decided once is decided in `create`: schemas are
// looked up, constants converted; indices were checked by program.py's Verifier. A Runner is immutable and all state of a call
// is in its Frame, so one Runner may run in several threads at once and inside itself.
//
// Memory that only kernels touch never becomes a Storage or a Tensor: a small graph costs one call, its allocations and its
// kernels. Read runtime_program.h, runtime_blocks.h, runtime_frame.h, runtime_device.h, runtime_calls.h, runtime_steps.h,
// runtime_loops.h: one translation unit, split for readers. GPUs are reached through torch's device-neutral headers and
// addresses that Python hands over, so the same source builds against a torch without CUDA.

#include "runtime_loops.h"

#include <structmember.h>

namespace {

PyObject* runner_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(flags) != 1 || (names && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "a compiled graph takes one list of inputs");
    return nullptr;
  }
  return Frame(*reinterpret_cast<Runner*>(self)->program).run(args[0]);
  END_HANDLE_TH_ERRORS
}

void runner_dealloc(PyObject* self) {
  auto* runner = reinterpret_cast<Runner*>(self);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (runner->weakrefs) PyObject_ClearWeakRefs(self);
  Py_CLEAR(runner->dict);
  delete runner->program;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

int runner_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* runner = reinterpret_cast<Runner*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(runner->dict);
  return 0;
}

int runner_clear(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Runner*>(self)->dict);
  return 0;
}

PyObject* runner_boxed(PyObject*, void*) { Py_RETURN_TRUE; }

PyMemberDef runner_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Runner, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(Runner, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Runner, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef runner_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {"_boxed_call", runner_boxed, nullptr, "AOTAutograd: takes one list and clears it.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot runner_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(runner_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(runner_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(runner_clear)},
    {Py_tp_members, runner_members},
    {Py_tp_getset, runner_getset},
    {Py_tp_doc, const_cast<char*>("A loaded program: call it with the boxed list of inputs.")},
    {0, nullptr}};

constexpr unsigned kRunnerFlags =
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION;

PyType_Spec runner_spec = {"kgen_runtime.Runner", sizeof(Runner), 0, kRunnerFlags, runner_slots};

PyObject* create(PyObject*, PyObject* spec) {
  HANDLE_TH_ERRORS
  std::unique_ptr<Program> program = parse_program(spec);
  Runner* runner = PyObject_GC_New(Runner, runner_type);
  if (!runner) return nullptr;
  runner->vectorcall = runner_call;
  runner->program = program.release();
  runner->dict = nullptr;
  runner->weakrefs = nullptr;
  PyObject_GC_Track(runner);
  return reinterpret_cast<PyObject*>(runner);
  END_HANDLE_TH_ERRORS
}

// What tells a tensor from another, and from itself after a write: where it is, where its elements are, and the version that
// autograd counts. Inference tensors have none.
struct Identity {
  const void *tensor, *data;
  int64_t version;
};

PyObject* identities(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyList_Check(args[0]) && PyTuple_Check(args[1]), "takes a list of arguments and a tuple of positions");
  const Py_ssize_t wanted = PyTuple_GET_SIZE(args[1]);
  Object found = checked(PyBytes_FromStringAndSize(nullptr, wanted * Py_ssize_t(sizeof(Identity))));
  for (Py_ssize_t i = 0; i < wanted; ++i) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[1], i));
    TORCH_CHECK_INDEX(position >= 0 && position < PyList_GET_SIZE(args[0]), "there is no argument ", position);
    PyObject* const item = PyList_GET_ITEM(args[0], position);
    TORCH_CHECK_TYPE(THPVariable_Check(item), "argument ", position, " is no tensor");
    const at::Tensor& tensor = THPVariable_Unpack(item);
    const Identity own{tensor.unsafeGetTensorImpl(), tensor.const_data_ptr(), tensor.is_inference() ? 0 : int64_t(tensor._version())};
    std::memcpy(PyBytes_AS_STRING(found.ptr) + i * Py_ssize_t(sizeof(own)), &own, sizeof(own));
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef module_methods[] = {{"create", create, METH_O, "Make a Runner of the tuples that kgen/host/native.py encodes."},
                                {"identities", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(identities)), METH_FASTCALL,
                                 "Of a list's tensors at some positions, as bytes: equal while these are what they were."},
                                {"repeat", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(repeat)), METH_FASTCALL,
                                 "Runs a compiled body as long as a compiled condition holds (kgen/host/loops.py)."},
                                {"scan", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(scan)), METH_FASTCALL,
                                 "Runs a compiled body for each row (kgen/host/loops.py)."},
                                {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "kgen_runtime", nullptr, -1, module_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_kgen_runtime() {
  PyObject* module = PyModule_Create(&module_def);
  if (!module) return nullptr;
  runner_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&runner_spec));
  if (!runner_type || PyModule_AddObjectRef(module, "Runner", reinterpret_cast<PyObject*>(runner_type)) != 0) return nullptr;
  return module;
}
