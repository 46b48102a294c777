// Loops over compiled bodies: one call steps through all iterations, with no Python in between.
#pragma once

#include <ATen/ops/empty.h>

#include <cstring>

#include "runtime_calls.h"

namespace {

PyTypeObject* runner_type = nullptr;

struct Runner {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Program* program;
  PyObject* dict;
  PyObject* weakrefs;
};

using Objects = std::vector<Object>;

// The results of a compiled graph, as a list or a tuple.
Object run_graph(PyObject* callable, const Objects& args) {
  Object list = checked(PyList_New(static_cast<Py_ssize_t>(args.size())));
  for (size_t i = 0; i < args.size(); ++i) PyList_SET_ITEM(list.ptr, static_cast<Py_ssize_t>(i), Py_NewRef(args[i].ptr));
  const bool native = Py_TYPE(callable) == runner_type;
  PyObject* made = native ? Frame(*reinterpret_cast<Runner*>(callable)->program).run(list.ptr)
                          : PyObject_CallOneArg(callable, list.ptr);
  return checked(PySequence_Fast(checked(made).ptr, "a compiled graph gives a list of results"));
}

bool holds(PyObject* callable, const Objects& args) {
  Object results = run_graph(callable, args);
  PyObject* flag = PySequence_Fast_GET_ITEM(results.ptr, 0);
  if (!THPVariable_Check(flag)) return PyObject_IsTrue(flag) == 1;
  const at::Tensor& tensor = THPVariable_Unpack(flag);
  if (tensor.is_cpu() && tensor.scalar_type() == at::kBool) return *tensor.const_data_ptr<bool>();
  return tensor.item().toBool();  // one read of a flag from the device
}

// A tensor with the strides that a body was compiled for; `strides` may be None.
Object restrided(PyObject* value, PyObject* strides) {
  if (strides == Py_None || !THPVariable_Check(value)) return Object::borrow(value);
  const at::Tensor& tensor = THPVariable_Unpack(value);
  Dims wanted;
  for (Py_ssize_t d = 0; d < length(strides); ++d) wanted.push_back(integer(strides, d));
  if (tensor.strides() == c10::IntArrayRef(wanted)) return Object::borrow(value);
  at::Tensor copy = at::empty_strided(tensor.sizes(), wanted, tensor.options());
  copy.copy_(tensor);
  return checked(THPVariable_Wrap(std::move(copy)));
}

Object as_tuple(PyObject* sequence) { return checked(PySequence_Tuple(sequence)); }

Objects objects(PyObject* list, const Object& strides, size_t first) {
  Object items = as_tuple(list);
  Objects made;
  for (Py_ssize_t i = 0; i < length(items.ptr); ++i)
    made.push_back(restrided(item(items.ptr, i), item(strides.ptr, static_cast<Py_ssize_t>(first) + i)));
  return made;
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) checked(nullptr);
}

// (condition, body, arguments, kept, strides of the condition's arguments, strides of the body's)
PyObject* repeat(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "takes six arguments");
  const size_t carried = static_cast<size_t>(length(args[3]));
  const Object asked = as_tuple(args[4]), strides = as_tuple(args[5]);
  Objects values = objects(args[2], strides, 0);
  const auto still_holds = [&] {
    Objects seen;
    for (size_t i = 0; i < values.size(); ++i)
      seen.push_back(restrided(values[i].ptr, item(asked.ptr, static_cast<Py_ssize_t>(i))));
    return holds(args[0], seen);
  };
  bool ran = false;
  for (; still_holds(); ran = true) {
    Object results = run_graph(args[1], values);
    for (size_t i = 0; i < carried; ++i) {
      if (item(args[3], static_cast<Py_ssize_t>(i)) == Py_True) continue;
      PyObject* made = PySequence_Fast_GET_ITEM(results.ptr, static_cast<Py_ssize_t>(i));
      values[i] = restrided(made, item(strides.ptr, static_cast<Py_ssize_t>(i)));
    }
    check_signals();
  }
  Object outputs = checked(PyTuple_New(static_cast<Py_ssize_t>(carried)));
  for (size_t i = 0; i < carried; ++i) {
    PyObject* value = values[i].ptr;
    const bool kept = item(args[3], static_cast<Py_ssize_t>(i)) == Py_True;
    Object made = Object::borrow(kept ? Py_None : value);
    if (!kept && !ran && THPVariable_Check(value)) made = checked(THPVariable_Wrap(THPVariable_Unpack(value).clone()));
    PyTuple_SET_ITEM(outputs.ptr, static_cast<Py_ssize_t>(i), made.release());
  }
  return outputs.release();
  END_HANDLE_TH_ERRORS
}

// Strides that a body was compiled for, read once; none where it does not matter.
struct Layout {
  bool matters = false;
  Dims strides;
};

std::vector<Layout> layouts(PyObject* each) {
  const Object items = as_tuple(each);
  std::vector<Layout> made(static_cast<size_t>(length(items.ptr)));
  for (size_t i = 0; i < made.size(); ++i) {
    PyObject* strides = item(items.ptr, static_cast<Py_ssize_t>(i));
    made[i].matters = strides != Py_None;
    for (Py_ssize_t d = 0; made[i].matters && d < length(strides); ++d) made[i].strides.push_back(integer(strides, d));
  }
  return made;
}

Object in_layout(Object value, const Layout& layout) {
  if (!layout.matters || !THPVariable_Check(value.ptr)) return value;
  const at::Tensor& tensor = THPVariable_Unpack(value.ptr);
  if (tensor.strides() == c10::IntArrayRef(layout.strides)) return value;
  at::Tensor copy = at::empty_strided(tensor.sizes(), layout.strides, tensor.options());
  copy.copy_(tensor);
  return checked(THPVariable_Wrap(std::move(copy)));
}

// A tensor that the iterations of a scan read row by row, in order. A row is made without the dispatcher.
class Scanned {
 public:
  Scanned(PyObject* whole, Layout layout) : whole_(THPVariable_Unpack(whole)), layout_(std::move(layout)) {
    sizes_ = Dims(whole_.sizes().slice(1));
    strides_ = Dims(whole_.strides().slice(1));
  }

  Object row(int64_t k) const {
    const int64_t start = whole_.storage_offset() + k * whole_.stride(0);
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole_.storage()), whole_.key_set(), whole_.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, start);
    return in_layout(checked(THPVariable_Wrap(std::move(made))), layout_);
  }

 private:
  const at::Tensor whole_;
  const Layout layout_;
  Dims sizes_, strides_;
};

// What the iterations of a scan give besides carried values, as the rows of tensors. Nothing where they give None.
struct Rows {
  std::vector<at::Tensor> made;
  void put(PyObject* results, size_t carried, int64_t k, int64_t count) {
    const size_t given = static_cast<size_t>(PySequence_Fast_GET_SIZE(results)) - carried;
    made.resize(given);
    for (size_t i = 0; i < given; ++i) {
      PyObject* value = PySequence_Fast_GET_ITEM(results, static_cast<Py_ssize_t>(carried + i));
      if (!THPVariable_Check(value)) continue;
      const at::Tensor& one = THPVariable_Unpack(value);
      if (!made[i].defined()) {
        Dims sizes(one.sizes());
        sizes.insert(sizes.begin(), count);
        made[i] = at::empty(sizes, one.options());
      }
      put_row(made[i], one, k);
    }
  }

 private:
  static void put_row(const at::Tensor& rows, const at::Tensor& one, int64_t k) {
    if (!one.is_cpu() || one.layout() != at::kStrided || !one.is_contiguous() || one.scalar_type() != rows.scalar_type() ||
        one.sizes() != rows.sizes().slice(1)) {
      rows.select(0, k).copy_(one);
      return;
    }
    const size_t bytes = one.nbytes();
    if (bytes) std::memcpy(static_cast<char*>(rows.mutable_data_ptr()) + k * bytes, one.const_data_ptr(), bytes);
  }
};

// (body, carried, rows, others, kept, strides of the body's arguments)
PyObject* scan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "takes six arguments");
  const Object rows = as_tuple(args[2]);
  const std::vector<Layout> wanted = layouts(args[5]);
  const auto kept = [&](size_t i) { return item(args[4], static_cast<Py_ssize_t>(i)) == Py_True; };
  const size_t carried = static_cast<size_t>(PyList_GET_SIZE(args[1])), scanned = static_cast<size_t>(length(rows.ptr));
  const auto layout_of = [&](size_t position) { return position < wanted.size() ? wanted[position] : Layout(); };
  std::vector<Scanned> sequences;
  for (size_t i = 0; i < scanned; ++i)
    sequences.emplace_back(item(rows.ptr, static_cast<Py_ssize_t>(i)), layout_of(carried + i));
  Objects given;
  const auto add = [&](PyObject* value) { given.push_back(in_layout(Object::borrow(value), layout_of(given.size()))); };
  for (size_t i = 0; i < carried; ++i) add(PyList_GET_ITEM(args[1], static_cast<Py_ssize_t>(i)));
  for (size_t i = 0; i < scanned; ++i) given.push_back(Object::borrow(Py_None));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[3]); ++i) add(PyList_GET_ITEM(args[3], i));
  const int64_t trips = THPVariable_Unpack(item(rows.ptr, 0)).size(0);
  Rows made;
  for (int64_t k = 0; k < trips; ++k) {
    for (size_t i = 0; i < scanned; ++i) given[carried + i] = sequences[i].row(k);
    Object results = run_graph(args[0], given);
    for (size_t i = 0; i < carried; ++i)
      if (!kept(i)) given[i] = in_layout(Object::borrow(PySequence_Fast_GET_ITEM(results.ptr, static_cast<Py_ssize_t>(i))), layout_of(i));
    made.put(results.ptr, carried, k, trips);
    check_signals();
  }
  Object outputs = checked(PyList_New(0));
  for (size_t i = 0; i < carried; ++i)
    if (PyList_Append(outputs.ptr, kept(i) ? Py_None : given[i].ptr) != 0) checked(nullptr);
  for (const at::Tensor& one : made.made) {
    Object row = one.defined() ? checked(THPVariable_Wrap(one)) : Object::borrow(Py_None);
    if (PyList_Append(outputs.ptr, row.ptr) != 0) checked(nullptr);
  }
  return outputs.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace
