// What a call does: kernels, operators through the dispatcher, Python functions, outputs.
#pragma once

#include "runtime_device.h"

namespace {

C10_ALWAYS_INLINE void Frame::arguments(const Instruction& item, void** ptrs, int64_t* ints) const {
  for (size_t i = 0; i < item.slots.size(); ++i) ptrs[i] = slots_[item.slots[i]].data;
  for (size_t i = 0; i < item.registers.size(); ++i) ints[i] = regs_[item.registers[i]];
}

void Frame::kernel(const Instruction& item, void** ptrs, int64_t* ints, int threads) const {
  arguments(item, ptrs, ints);
  const int failure = item.kernel(ptrs, ints, threads);  // one of kgen.ir.ops.FAILURES
  TORCH_CHECK(failure != 2, "ZeroDivisionError");
  TORCH_CHECK_INDEX(failure == 0, "index out of range in a kernel of a compiled graph", item.message);
}

IValue number(int64_t value, TypeKind as, Number kind) {
  if (kind == Number::Float) {
    const double real = std::bit_cast<double>(value);
    return as == TypeKind::TensorType ? wrapped_number(real) : IValue(real);
  }
  if (kind == Number::Bool && as != TypeKind::IntType && as != TypeKind::SymIntType && as != TypeKind::FloatType)
    return as == TypeKind::TensorType ? wrapped_number(value != 0) : IValue(value != 0);
  switch (as) {
    case TypeKind::FloatType: return static_cast<double>(value);
    case TypeKind::BoolType: return value != 0;
    case TypeKind::TensorType: return wrapped_number(value);
    default: return value;
  }
}

IValue Frame::boxed(const Arg& arg) {
  switch (arg.kind) {
    case Arg::Tensor: return view(arg.view);
    case Arg::Int: return number(regs_[arg.reg], arg.as, arg.number);
    case Arg::Const: return arg.value;
    default: return boxed_list(arg);
  }
}

IValue Frame::boxed_list(const Arg& arg) {
  if (arg.as == TypeKind::TensorType && !arg.optional_elements) {
    c10::List<at::Tensor> list;
    list.reserve(arg.items.size());
    for (const Arg& item : arg.items) list.push_back(boxed(item).toTensor());
    return list;
  }
  if (arg.as == TypeKind::TensorType) {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(arg.items.size());
    for (const Arg& item : arg.items) list.push_back(boxed(item).toOptional<at::Tensor>());
    return list;
  }
  if (arg.as == TypeKind::IntType || arg.as == TypeKind::SymIntType) {
    c10::List<int64_t> list;
    list.reserve(arg.items.size());
    for (const Arg& item : arg.items) list.push_back(boxed(item).toInt());
    return list;
  }
  c10::impl::GenericList list(arg.element ? arg.element : c10::TypePtr(c10::AnyType::get()));
  for (const Arg& item : arg.items) list.push_back(boxed(item));
  return list;
}

void Frame::take(const Call& call, size_t position, at::Tensor tensor) {
  if (position >= call.outs.size() || call.outs[position].slot < 0) return;
  const Result& out = call.outs[position];
  if (tensor.defined() && tensor.is_neg()) tensor = tensor.resolve_neg();
  if (out.check) tensor = in_expected_layout(out, std::move(tensor), call.name.c_str());
  if (out.aligned) tensor = aligned_result(std::move(tensor));
  adopt(out.slot, std::move(tensor));
}

void Frame::take_integer(const Call& call, size_t position, int64_t value) {
  for (const auto& [at, reg] : call.registers)
    if (static_cast<size_t>(at) == position) regs_[reg] = value;
}

void Frame::call_boxed(const Call& call, Stack& stack) {
  stack.clear();
  for (const Arg& arg : call.args) stack.push_back(boxed(arg));
  call.op->callBoxed(stack);
  size_t position = 0;
  for (IValue& value : stack) {
    if (value.isTensorList()) {
      for (at::Tensor tensor : value.toTensorVector()) take(call, position++, std::move(tensor));
    } else if (value.isTensor()) {
      take(call, position++, std::move(value).toTensor());
    } else {
      if (value.isInt()) take_integer(call, position, value.toInt());
      if (value.isBool()) take_integer(call, position, value.toBool());
      if (value.isDouble()) take_integer(call, position, std::bit_cast<int64_t>(value.toDouble()));
      take(call, position++, at::Tensor());  // None where a tensor was possible
    }
  }
  stack.clear();
}

PyObject* python_number(int64_t value, Number kind) {
  if (kind == Number::Bool) return PyBool_FromLong(value != 0);
  return kind == Number::Float ? PyFloat_FromDouble(std::bit_cast<double>(value)) : PyLong_FromLongLong(value);
}

Object Frame::python(const Arg& arg) {
  if (arg.kind == Arg::Const) return Object::borrow(arg.object.ptr);
  if (arg.kind == Arg::Int) return checked(python_number(regs_[arg.reg], arg.number));
  if (arg.kind == Arg::Tensor) return checked(THPVariable_Wrap(view(arg.view)));
  Object list = checked(PyList_New(static_cast<Py_ssize_t>(arg.items.size())));
  for (size_t i = 0; i < arg.items.size(); ++i)
    PyList_SET_ITEM(list.ptr, static_cast<Py_ssize_t>(i), python(arg.items[i]).release());
  return list;
}

void Frame::call_python(const Call& call) {
  Object args = checked(PyTuple_New(static_cast<Py_ssize_t>(call.args.size())));
  for (size_t i = 0; i < call.args.size(); ++i)
    PyTuple_SET_ITEM(args.ptr, static_cast<Py_ssize_t>(i), python(call.args[i]).release());
  Object kwargs = checked(PyDict_New());
  for (const auto& [name, arg] : call.kwargs) PyDict_SetItem(kwargs.ptr, name.ptr, python(arg).ptr);
  Object result = checked(PyObject_Call(call.callable.ptr, args.ptr, kwargs.ptr));
  if (!PyTuple_Check(result.ptr) && !PyList_Check(result.ptr)) result = checked(PyTuple_Pack(1, result.ptr));
  Object results = checked(PySequence_Fast(result.ptr, "the result of a Python call"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(results.ptr); ++i) {
    PyObject* value = PySequence_Fast_GET_ITEM(results.ptr, i);
    const size_t position = static_cast<size_t>(i);
    if (PyLong_Check(value)) take_integer(call, position, integer(value));
    if (PyFloat_Check(value)) take_integer(call, position, std::bit_cast<int64_t>(PyFloat_AS_DOUBLE(value)));
    take(call, position, THPVariable_Check(value) ? THPVariable_Unpack(value) : at::Tensor());
  }
}

const Instruction& Frame::picked(const Instruction& item) const {
  size_t i = 0;
  while (i < item.limits.size() && regs_[item.reg] > item.limits[i]) ++i;
  return item.items[i];
}

// A region of the profiler's timeline. It asks once whether anybody listens; without, it costs nanoseconds.
class Region {
 public:
  explicit Region(const std::string& name) : guard_(at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    if (guard_) recorded_.emplace(std::move(*guard_)).before(std::string_view(name));
  }

 private:
  std::optional<at::StepCallbacks> guard_;
  std::optional<at::RecordFunction> recorded_;
};

// Opens the region of one step, where steps have regions.
void open_region(std::optional<Region>& made, const Program& program, const Instruction& item) {
  if (program.regions && !item.name.empty()) made.emplace(item.name);
}

void Frame::execute(Gil& gil) {
  std::optional<Region> whole;
  if (!program_.name.empty()) whole.emplace(program_.name);
  std::optional<DispatchGuards> guards;
  if (program_.dispatches) guards.emplace();
  c10::SmallVector<void*, 16> ptrs(program_.widest_kernel);
  c10::SmallVector<int64_t, 16> ints(program_.widest_integers);
  Stack stack;
  const int threads = at::get_num_threads();
  for (const Instruction& step : program_.code) {
    const Instruction& item = step.kind == Instruction::Pick ? picked(step) : step;
    std::optional<Region> timed;
    open_region(timed, program_, item);
    switch (item.kind) {
      case Instruction::Alloc: allocate(item.slot); break;
      case Instruction::Free: free(item.slot); break;
      case Instruction::Reuse: reuse(item.slot, item.source); break;
      case Instruction::Alias: alias(item.slot, item.source, item.flag); break;
      case Instruction::Kernel: kernel(item, ptrs.data(), ints.data(), threads); break;
      case Instruction::Extern: call_boxed(*item.call, stack); break;
      case Instruction::Python:
        gil.acquire();
        call_python(*item.call);
        gil.release();
        break;
      case Instruction::BindSize: {
        const at::Tensor& tensor = own(item.slot);
        regs_[item.reg] = item.flag ? tensor.stride(item.dim) : tensor.size(item.dim);
        break;
      }
      case Instruction::Calculate: compute(item.compute, regs_.data()); break;
      case Instruction::Launch: launch(item, ptrs.data(), ints.data()); break;
      case Instruction::Check:
        TORCH_CHECK_INDEX(regs_[item.reg] || !item.flag, item.message);
        TORCH_CHECK(regs_[item.reg], item.message);
        break;
      case Instruction::Pick: break;  // what is picked is a kernel, never another pick
    }
  }
}

// Outputs are made in order, so the next of `returned_` is this one's.
PyObject* Frame::argument(const Output& out) {
  Object given = std::move(returned_[next_returned_++]);
  return out.object.ptr ? PyNumber_Multiply(given.ptr, out.object.ptr) : given.release();
}

PyObject* Frame::output(const Output& out) {
  if (out.kind == Output::Argument) return argument(out);
  if (out.kind == Output::Int) return python_number(regs_[out.reg], out.number);
  if (out.kind == Output::Const) return Py_NewRef(out.object.ptr);
  at::Tensor tensor = out.last ? give(out.view) : view(out.view);
  if (!tensor.defined()) return Py_NewRef(Py_None);
  return THPVariable_Wrap(std::move(tensor));
}

PyObject* Frame::run(PyObject* boxed) {
  {
    Object sequence = checked(PySequence_Fast(boxed, "a compiled graph takes one list of inputs"));
    bind(PySequence_Fast_ITEMS(sequence.ptr), PySequence_Fast_GET_SIZE(sequence.ptr));
    for (const Compute& item : program_.computes) compute(item, regs_.data());
    check_inputs(PySequence_Fast_ITEMS(sequence.ptr));
    take_inputs(PySequence_Fast_ITEMS(sequence.ptr));
  }
  if (PyList_Check(boxed) && PyList_SetSlice(boxed, 0, PyList_GET_SIZE(boxed), nullptr) != 0) checked(nullptr);
  for (const auto& [slot, tensor] : program_.constants) adopt(slot, tensor);
  try {
    Gil gil;
    execute(gil);
    for (const Moved& moved : moved_) put_back(moved);
  } catch (const MapRefused& refused) {
    fail(refused);
  }
  Object outputs = checked(PyList_New(static_cast<Py_ssize_t>(program_.outputs.size())));
  for (size_t i = 0; i < program_.outputs.size(); ++i)
    PyList_SET_ITEM(outputs.ptr, static_cast<Py_ssize_t>(i), checked(output(program_.outputs[i])).release());
  return outputs.release();
}

}  // namespace
