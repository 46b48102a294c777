// Loops over compiled bodies: one call steps through all iterations, with no Python in between.
#pragma once

#include <ATen/ops/empty.h>

#include <cstring>

#include "runtime_steps.h"

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

at::Tensor in_layout(at::Tensor tensor, const Layout& layout) {
  if (!layout.matters || tensor.strides() == c10::IntArrayRef(layout.strides)) return tensor;
  at::Tensor copy = at::empty_strided(tensor.sizes(), layout.strides, tensor.options());
  copy.copy_(tensor);
  return copy;
}

Object in_layout(Object value, const Layout& layout) {
  if (!layout.matters || !THPVariable_Check(value.ptr)) return value;
  const at::Tensor& tensor = THPVariable_Unpack(value.ptr);
  if (tensor.strides() == c10::IntArrayRef(layout.strides)) return value;
  return checked(THPVariable_Wrap(in_layout(tensor, layout)));
}

// A tensor whose rows along its first dimension have a layout, and begin at cache lines.
at::Tensor rows_in_layout(const at::Tensor& whole, const Layout& layout) {
  int64_t elements = 1;
  for (size_t d = 0; d < layout.strides.size(); ++d) elements += (whole.size(d + 1) - 1) * layout.strides[d];
  const int64_t line = 64 / std::min<int64_t>(64, static_cast<int64_t>(whole.itemsize()));
  Dims strides(layout.strides);
  strides.insert(strides.begin(), (elements + line - 1) / line * line);
  at::Tensor copy = at::empty_strided(whole.sizes(), strides, whole.options());
  return copy.copy_(whole);
}

// A tensor that the iterations of a scan read row by row, in order. A row is made without the dispatcher. Small rows of another
// layout than the body was compiled for are copied together: to copy each takes longer than the kernels of a small body.
class Scanned {
 public:
  static constexpr size_t copied_together = 1 << 20;

  Scanned(PyObject* whole, Layout layout) : whole_(THPVariable_Unpack(whole)), layout_(std::move(layout)) {
    const bool other = layout_.matters && whole_.strides().slice(1) != c10::IntArrayRef(layout_.strides);
    if (other && whole_.numel() > 0 && whole_.nbytes() <= copied_together) whole_ = rows_in_layout(whole_, layout_);
    sizes_ = Dims(whole_.sizes().slice(1));
    strides_ = Dims(whole_.strides().slice(1));
  }

  Object row(int64_t k) const { return checked(THPVariable_Wrap(tensor(k))); }

  at::Tensor tensor(int64_t k) const {
    const int64_t start = whole_.storage_offset() + k * whole_.stride(0);
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole_.storage()), whole_.key_set(), whole_.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, start);
    return in_layout(std::move(made), layout_);
  }

 private:
  at::Tensor whole_;
  Layout layout_;
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

  // Where result `i` of iteration k goes; undefined where kernels might want it better aligned.
  at::Tensor row(size_t i, int64_t k) const {
    const at::Tensor& rows = made[i];
    const auto aligned = [](int64_t bytes) { return bytes % 64 == 0; };
    if (!rows.defined() || !aligned(reinterpret_cast<intptr_t>(rows.const_data_ptr()))) return at::Tensor();
    const int64_t stride = rows.strides()[0];
    if (!aligned(stride * static_cast<int64_t>(rows.itemsize()))) return at::Tensor();
    at::Tensor one = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(rows.storage()), rows.key_set(), rows.dtype());
    one.unsafeGetTensorImpl()->set_sizes_and_strides(rows.sizes().slice(1), rows.strides().slice(1), k * stride);
    return one;
  }

  void take(size_t i, const at::Tensor& one, int64_t k) const {
    const int64_t bytes = k * made[i].strides()[0] * static_cast<int64_t>(made[i].itemsize());
    if (one.const_data_ptr() != static_cast<const char*>(made[i].const_data_ptr()) + bytes) put_row(made[i], one, k);
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

// A scan on its way: what the body is given, and what has been made of it.
struct Scan {
  PyObject* body;
  size_t carried;
  std::vector<Scanned> sequences;
  std::vector<Layout> layouts;
  std::vector<bool> kept;  // of carried values: the body writes into them
  Objects given;
  Rows made;
  int64_t trips = 0;

  const Layout& layout(size_t position) const {
    static const Layout any;
    return position < layouts.size() ? layouts[position] : any;
  }

  // One iteration that may be anything.
  void run(int64_t k) {
    for (size_t i = 0; i < sequences.size(); ++i) given[carried + i] = sequences[i].row(k);
    Object results = run_graph(body, given);
    for (size_t i = 0; i < carried; ++i)
      if (!kept[i]) given[i] = in_layout(Object::borrow(PySequence_Fast_GET_ITEM(results.ptr, static_cast<Py_ssize_t>(i))), layout(i));
    made.put(results.ptr, carried, k, trips);
    check_signals();
  }

  // The program of the body, if what it is given is tensors, and the next iteration's are of the kinds of the last one's.
  const Program* stepped(const std::vector<at::Tensor>& before) const {
    if (Py_TYPE(body) != runner_type) return nullptr;
    const Program* program = reinterpret_cast<Runner*>(body)->program;
    if (!can_step(*program) || before.size() != given.size() || program->inputs.size() != given.size()) return nullptr;
    for (size_t i = 0; i < given.size(); ++i) {
      if (!THPVariable_Check(given[i].ptr) || THPVariable_Unpack(given[i].ptr).layout() != at::kStrided) return nullptr;
      const at::Tensor& one = THPVariable_Unpack(given[i].ptr);
      if (one.sizes() != before[i].sizes() || one.scalar_type() != before[i].scalar_type()) return nullptr;
    }
    return program;
  }

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> found;
    for (const Object& one : given)
      if (THPVariable_Check(one.ptr)) found.push_back(THPVariable_Unpack(one.ptr));
    return found;
  }

  void step_through(const Program& program, int64_t first);
};

// Iterations without Python. Carried values take turns in memory, and rows are written where they belong.
void Scan::step_through(const Program& program, int64_t first) {
  std::vector<at::Tensor> args = tensors(), outs;
  std::vector<int32_t> slots;
  for (size_t i = 0; i < program.outputs.size(); ++i) slots.push_back(movable(program, i));
  std::vector<Spare> spare(carried);
  std::vector<Destination> wanted;
  {
    Gil gil;
    for (int64_t k = first; k < trips; ++k) {
      for (size_t i = 0; i < sequences.size(); ++i) args[carried + i] = sequences[i].tensor(k);
      wanted.clear();
      for (size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] < 0 || (i < carried && kept[i])) continue;
        at::Tensor there = i < carried ? spare[i].like(args[i]) : made.row(i - carried, k);
        if (there.defined()) wanted.push_back({slots[i], std::move(there)});
      }
      Frame(program).step(args.data(), wanted, outs, gil);
      for (size_t i = 0; i < outs.size(); ++i) {
        if (i >= carried && outs[i].defined()) {
          made.take(i - carried, outs[i], k);
        } else if (i < carried && !kept[i]) {
          args[i] = in_layout(std::move(outs[i]), layout(i));
        }
      }
      if (k % 64 == 0) {
        gil.acquire();
        check_signals();
        gil.release();
      }
    }
  }
  for (size_t i = 0; i < carried; ++i)
    if (!kept[i]) given[i] = checked(THPVariable_Wrap(std::move(args[i])));
}

// (body, carried, rows, others, kept, strides of the body's arguments)
PyObject* scan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "takes six arguments");
  const Object rows = as_tuple(args[2]);
  Scan loop{args[0], static_cast<size_t>(PyList_GET_SIZE(args[1])), {}, layouts(args[5]), {}, {}, {}, 0};
  const auto add = [&](PyObject* value) {
    loop.given.push_back(in_layout(Object::borrow(value), loop.layout(loop.given.size())));
  };
  for (size_t i = 0; i < loop.carried; ++i) {
    add(PyList_GET_ITEM(args[1], static_cast<Py_ssize_t>(i)));
    loop.kept.push_back(item(args[4], static_cast<Py_ssize_t>(i)) == Py_True);
  }
  for (Py_ssize_t i = 0; i < length(rows.ptr); ++i) {
    loop.sequences.emplace_back(item(rows.ptr, i), loop.layout(loop.given.size()));
    loop.given.push_back(Object::borrow(Py_None));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[3]); ++i) add(PyList_GET_ITEM(args[3], i));
  loop.trips = THPVariable_Unpack(item(rows.ptr, 0)).size(0);
  // The first iteration says of what kinds results are; with the second one, carried values are of the kinds of results.
  std::vector<at::Tensor> before;
  for (int64_t k = 0; k < std::min<int64_t>(loop.trips, 1); ++k) {
    for (size_t i = 0; i < loop.sequences.size(); ++i) loop.given[loop.carried + i] = loop.sequences[i].row(k);
    before = loop.tensors();
    loop.run(k);
  }
  if (const Program* program = loop.trips > 1 ? loop.stepped(before) : nullptr) {
    before.clear();
    loop.step_through(*program, 1);
  } else {
    for (int64_t k = 1; k < loop.trips; ++k) loop.run(k);
  }
  Object outputs = checked(PyList_New(0));
  for (size_t i = 0; i < loop.carried; ++i)
    if (PyList_Append(outputs.ptr, loop.kept[i] ? Py_None : loop.given[i].ptr) != 0) checked(nullptr);
  for (const at::Tensor& one : loop.made.made) {
    Object row = one.defined() ? checked(THPVariable_Wrap(one)) : Object::borrow(Py_None);
    if (PyList_Append(outputs.ptr, row.ptr) != 0) checked(nullptr);
  }
  return outputs.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace
