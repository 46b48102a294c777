// What runtime.cpp keeps of a Program, and how it is read from the tuples that kgen/host/native.py makes.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Dtype.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

// Declared by torch/csrc/jit/python/pybind_utils.h, which costs seconds to compile.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle obj, const c10::TypePtr& type, std::optional<int32_t> N);
}

namespace {

using c10::IValue;
using c10::TypeKind;
using KernelFn = int (*)(void** ptrs, const int64_t* ints, int threads);
// Of kgen/host/launch.cpp.
using LaunchFn = int (*)(void* site, int device, void* stream, void** ptrs, const int64_t* ints, const int64_t* grid,
                         void** scratch);
using LaunchErrorFn = const char* (*)();
using CreateSiteFn = void* (*)(void* kernel);
using DestroySiteFn = void (*)(void* site);
using StreamFn = int32_t (*)(int32_t device, void** stream);  // aoti_torch_get_current_cuda_stream
using Dims = c10::SmallVector<int64_t, 8>;
using Stack = torch::jit::Stack;

// ---- reading the spec -------------------------------------------------------------------------------------------------

struct Object {  // an owned reference
  PyObject* ptr = nullptr;
  Object() = default;
  explicit Object(PyObject* stolen) : ptr(stolen) {}
  Object(Object&& other) noexcept : ptr(std::exchange(other.ptr, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(ptr, other.ptr);
    return *this;
  }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  ~Object() { Py_XDECREF(ptr); }
  PyObject* release() { return std::exchange(ptr, nullptr); }
  static Object borrow(PyObject* ptr) {
    Py_XINCREF(ptr);
    return Object(ptr);
  }
};

Object checked(PyObject* made) {  // a failed C API call becomes the C++ exception that HANDLE_TH_ERRORS turns back
  if (!made) {
    python_error error;
    error.persist();
    throw error;
  }
  return Object(made);
}

PyObject* item(PyObject* tuple, Py_ssize_t position) {
  TORCH_CHECK(PyTuple_Check(tuple) && position < PyTuple_GET_SIZE(tuple), "kgen runtime: malformed program");
  return PyTuple_GET_ITEM(tuple, position);
}

Py_ssize_t length(PyObject* tuple) {
  TORCH_CHECK(PyTuple_Check(tuple), "kgen runtime: malformed program");
  return PyTuple_GET_SIZE(tuple);
}

int64_t integer(PyObject* object) {
  int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    python_error error;
    error.persist();
    throw error;
  }
  return value;
}

int64_t integer(PyObject* tuple, Py_ssize_t position) { return integer(item(tuple, position)); }

std::string text(PyObject* object) {
  const char* chars = PyUnicode_AsUTF8(object);
  TORCH_CHECK(chars, "kgen runtime: malformed program");
  return chars;
}

at::ScalarType scalar_type(PyObject* object) {
  TORCH_CHECK(THPDtype_Check(object), "kgen runtime: malformed program");
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

// ---- the program ------------------------------------------------------------------------------------------------------

using Regs = std::vector<int32_t>;  // register or slot numbers; -1 stands for "none" or "not checked"

Regs numbers(PyObject* tuple) {
  Regs out(length(tuple));
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<int32_t>(integer(tuple, static_cast<Py_ssize_t>(i)));
  return out;
}

struct View {
  int32_t slot = -1;
  bool own = true;     // the slot's own geometry: its tensor may be used as it is
  bool exact = false;  // that geometry, with these strides in dimensions of length 1
  at::ScalarType dtype = at::ScalarType::Float;
  Regs sizes, strides;
  int32_t offset = -1;
};

View parse_view(PyObject* tuple) {  // (_, slot, own, sizes, strides, offset, dtype, exact)
  View view;
  view.slot = static_cast<int32_t>(integer(tuple, 1));
  view.own = integer(tuple, 2) != 0;
  if (!view.own) {
    view.sizes = numbers(item(tuple, 3));
    view.strides = numbers(item(tuple, 4));
    view.offset = static_cast<int32_t>(integer(tuple, 5));
    view.dtype = scalar_type(item(tuple, 6));
    view.exact = integer(tuple, 7) != 0;
  }
  return view;
}

struct SlotSpec {
  at::ScalarType dtype;
  int64_t itemsize;
  Regs sizes, strides;
  int32_t offset;
  c10::Device device;
};

// One reading of an input's memory, for the case that the input must be copied.
struct Geometry {
  Regs sizes, strides;
  int32_t offset;
  int64_t itemsize;
};

struct Bind {
  int32_t reg;
  bool stride;
  int32_t dim;
};

struct Input {
  enum Kind { Tensor, Int, Ignored } kind;
  int32_t slot = -1, reg = -1;
  bool check = false, check_strides = false;
  bool passed_on = false;     // of any type, on any device
  bool only_kernels = false;  // nothing but kernels reads or writes it: it is never needed as a tensor
  at::ScalarType dtype = at::ScalarType::Float;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  Regs sizes, strides;
  std::vector<Bind> binds;
  bool aligned = false, mutated = false;
  bool all_known = false;  // `readings` are all there are, and can be computed before the first instruction
  std::vector<Geometry> readings;
};

enum class ComputeOp {  // the order of COMPUTE_OPS in program.py
  Add, Sub, Mul, FloorDiv, Mod, Min, Max, Pow, Shl, Shr, And, Or, Xor, Lt, Le, Eq, Select,
  Float, FAdd, FMul, FDiv, FPow, FMin, FMax, FLt, FLe, FEq, FTrunc, FFloor, FCeil, FRound, FSqrt,
  FExp, FLog, FLog2, FSin, FCos, FTan, FAsin, FAcos, FAtan, FSinh, FCosh, FTanh, FAsinh, FMod, FRoundDec
};

enum class Number { Int, Bool, Float };  // what a register holds; a float is held by its bits

struct Compute {
  int32_t dst, a, b, c;
  ComputeOp op;
};

struct Arg {
  enum Kind { Tensor, Int, Const, List } kind;
  View view;
  int32_t reg = -1;
  Number number = Number::Int;
  TypeKind as = TypeKind::AnyType;  // what the schema wants: of an Int, or of a List's elements
  bool optional_elements = false;
  c10::TypePtr element;  // of a List
  IValue value;          // of a Const in a boxed call
  Object object;         // of a Const in a Python call
  std::vector<Arg> items;
};

struct Result {
  int32_t slot = -1;
  bool check = false;  // the slot's sizes are known before the call, so the result is held to them
  bool aligned = false;
  bool passed_on = false;  // only the library and the caller see it
};

struct Call {
  std::optional<c10::OperatorHandle> op;  // empty for a Python call
  std::string name;
  Object callable;
  std::vector<Arg> args;
  std::vector<std::pair<Object, Arg>> kwargs;  // Python calls only: boxed calls have them in schema order in `args`
  std::vector<Result> outs;
  std::vector<std::pair<int32_t, int32_t>> registers;
};

struct Launch {
  LaunchFn call;
  LaunchErrorFn error;
  std::unique_ptr<void, DestroySiteFn> site;
  c10::Device device;
  int32_t grid[3];
  std::vector<int64_t> scratch;    // bytes for each block
  std::vector<std::string> names;  // of the kernel, then of the buffers of its TMA descriptors
};

struct MapRefused {  // descriptor `map` of a launch cannot be encoded
  const Launch& launch;
  size_t map;
  std::string problem;
};

struct Instruction {
  enum Kind { Alloc, Free, Reuse, Alias, Kernel, Extern, Python, BindSize, Calculate, Launch, Pick, Check } kind;
  int32_t slot = -1, source = -1, reg = -1, dim = -1;
  bool flag = false;  // Alias: same geometry as the source; BindSize: a stride; Check: of an index
  KernelFn kernel = nullptr;
  std::string name;  // of a kernel's region in a profiler's timeline; empty where it has none
  Regs slots, registers;
  Compute compute{};
  std::unique_ptr<Call> call;
  std::unique_ptr<struct Launch> launch;
  std::vector<int64_t> limits;     // Pick: one fewer than items
  std::vector<Instruction> items;  // Pick: of which one runs
  std::string message;             // Check; Kernel: what it computes
};

struct Output {
  enum Kind { Tensor, Int, Const, Argument } kind;
  View view;
  bool last = false;  // no later output is of the same slot
  int32_t reg = -1;
  Number number = Number::Int;
  Object object;         // of a Const; the factor of an Argument, null for 1
  int32_t argument = -1;  // which of the inputs
};

struct Program {
  std::vector<Input> inputs;
  std::vector<int64_t> registers;
  std::vector<Compute> computes;
  std::vector<SlotSpec> slots;
  std::vector<std::pair<int32_t, at::Tensor>> constants;
  std::vector<Instruction> code;
  std::vector<Output> outputs;
  Object keep_alive, mismatch, map_refused;
  StreamFn current_stream = nullptr;  // of a CUDA device
  std::string name;      // of a call's region; empty where it has none
  bool regions = false;  // each kernel and launch has one
  bool dispatches = false;
  size_t widest_kernel = 0, widest_integers = 0;

  void note(const Instruction& made) {  // what a call has to have room for
    dispatches |= made.call != nullptr;
    widest_kernel = std::max(widest_kernel, made.slots.size());
    widest_integers = std::max(widest_integers, made.registers.size());
    for (const Instruction& one : made.items) note(one);
  }
};

Compute parse_compute(PyObject* tuple, Py_ssize_t at) {
  auto field = [&](Py_ssize_t i) { return static_cast<int32_t>(integer(tuple, at + i)); };
  return {field(0), field(2), field(3), field(4), static_cast<ComputeOp>(field(1))};
}

void* address(PyObject* tuple, Py_ssize_t position) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(integer(tuple, position)));
}

// (..., aligned, mutated, all_known, readings) from position 8 on; what follows them is read by whoever parses the input
void parse_alignment(PyObject* tuple, Input& input) {
  input.aligned = integer(tuple, 8) != 0;
  input.mutated = integer(tuple, 9) != 0;
  input.all_known = integer(tuple, 10) != 0;
  PyObject* readings = item(tuple, 11);
  for (Py_ssize_t i = 0; i < length(readings); ++i) {
    PyObject* reading = item(readings, i);
    input.readings.push_back({numbers(item(reading, 0)), numbers(item(reading, 1)),
                              static_cast<int32_t>(integer(reading, 2)), integer(reading, 3)});
  }
}

Input parse_input(PyObject* tuple) {
  Input input;
  input.kind = static_cast<Input::Kind>(integer(tuple, 0));
  if (input.kind == Input::Int) {
    input.reg = static_cast<int32_t>(integer(tuple, 1));
    input.check = integer(tuple, 2) != 0;
  } else if (input.kind == Input::Tensor) {
    input.slot = static_cast<int32_t>(integer(tuple, 1));
    input.dtype = scalar_type(item(tuple, 2));
    input.device = c10::Device(text(item(tuple, 3)));
    parse_alignment(tuple, input);
    input.sizes = numbers(item(tuple, 4));
    input.check_strides = item(tuple, 5) != Py_None;
    if (input.check_strides) input.strides = numbers(item(tuple, 5));
    input.only_kernels = integer(tuple, 7) != 0;
    input.passed_on = integer(tuple, 12) != 0;
    PyObject* binds = item(tuple, 6);
    for (Py_ssize_t i = 0; i < length(binds); ++i) {
      PyObject* bind = item(binds, i);
      input.binds.push_back(
          {static_cast<int32_t>(integer(bind, 0)), integer(bind, 1) != 0, static_cast<int32_t>(integer(bind, 2))});
    }
  }
  return input;
}

c10::TypePtr without_optional(c10::TypePtr type) {
  while (type && type->kind() == TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
  return type;
}

IValue wrapped_number(const at::Scalar& number) {  // a number where the schema wants a tensor: promotes as a number does
  at::Tensor tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

IValue constant(PyObject* object, const c10::TypePtr& declared) {
  c10::TypePtr type = without_optional(declared);
  if (type->kind() == TypeKind::TensorType && !THPVariable_Check(object) && object != Py_None) {
    if (PyBool_Check(object)) return wrapped_number(object == Py_True);
    if (PyLong_Check(object)) return wrapped_number(integer(object));
    if (PyFloat_Check(object)) return wrapped_number(PyFloat_AsDouble(object));
    if (PyComplex_Check(object))
      return wrapped_number(c10::complex<double>(PyComplex_RealAsDouble(object), PyComplex_ImagAsDouble(object)));
  }
  return torch::jit::toIValue(object, declared, std::nullopt);
}

// `declared` is null for a Python call, whose constants stay Python objects.
Arg parse_arg(PyObject* tuple, const c10::TypePtr& declared) {
  Arg arg;
  arg.kind = static_cast<Arg::Kind>(integer(tuple, 0));
  c10::TypePtr type = without_optional(declared);
  if (arg.kind == Arg::Tensor) {
    arg.view = parse_view(tuple);
  } else if (arg.kind == Arg::Int) {
    arg.reg = static_cast<int32_t>(integer(tuple, 1));
    arg.number = static_cast<Number>(integer(tuple, 2));
    if (type) arg.as = type->kind();
  } else if (arg.kind == Arg::Const) {
    if (type)
      arg.value = constant(item(tuple, 1), declared);
    else
      arg.object = Object::borrow(item(tuple, 1));
  } else {
    if (type && type->kind() == TypeKind::ListType) {
      arg.element = type->expectRef<c10::ListType>().getElementType();
      arg.optional_elements = arg.element->kind() == TypeKind::OptionalType;
      arg.as = without_optional(arg.element)->kind();
    }
    PyObject* items = item(tuple, 1);
    for (Py_ssize_t i = 0; i < length(items); ++i)
      arg.items.push_back(parse_arg(item(items, i), type ? (arg.element ? arg.element : type) : nullptr));
  }
  return arg;
}

void parse_results(PyObject* outs, PyObject* registers, Call& call) {
  for (Py_ssize_t i = 0; i < length(outs); ++i)
    call.outs.push_back({static_cast<int32_t>(integer(item(outs, i), 0)), integer(item(outs, i), 1) != 0,
                         integer(item(outs, i), 2) != 0, integer(item(outs, i), 3) != 0});
  for (Py_ssize_t i = 0; i < length(registers); ++i)
    call.registers.emplace_back(integer(item(registers, i), 0), integer(item(registers, i), 1));
}

std::unique_ptr<Call> parse_extern(PyObject* tuple) {  // (_, op, overload, args, kwargs, outs, registers)
  auto call = std::make_unique<Call>();
  call->name = text(item(tuple, 1));
  call->op = c10::Dispatcher::singleton().findSchemaOrThrow(call->name.c_str(), text(item(tuple, 2)).c_str());
  const auto& declared = call->op->schema().arguments();
  PyObject *args = item(tuple, 3), *kwargs = item(tuple, 4);
  TORCH_CHECK(length(args) <= static_cast<Py_ssize_t>(declared.size()), call->name, ": too many arguments");
  Py_ssize_t used = 0;
  for (size_t i = 0; i < declared.size(); ++i) {
    PyObject* given = static_cast<Py_ssize_t>(i) < length(args) ? item(args, static_cast<Py_ssize_t>(i)) : nullptr;
    for (Py_ssize_t k = 0; !given && k < length(kwargs); ++k) {
      if (text(item(item(kwargs, k), 0)) == declared[i].name()) {
        given = item(item(kwargs, k), 1);
        ++used;
      }
    }
    if (given) {
      call->args.push_back(parse_arg(given, declared[i].real_type()));
    } else {
      TORCH_CHECK(declared[i].default_value().has_value(), call->name, ": argument ", declared[i].name(), " is missing");
      Arg arg;
      arg.kind = Arg::Const;
      arg.value = *declared[i].default_value();
      call->args.push_back(std::move(arg));
    }
  }
  TORCH_CHECK(used == length(kwargs), call->name, ": unknown keyword argument");
  parse_results(item(tuple, 5), item(tuple, 6), *call);
  return call;
}

std::unique_ptr<Call> parse_python(PyObject* tuple) {  // (_, callable, args, kwargs, outs, registers)
  auto call = std::make_unique<Call>();
  call->name = "a Python call";
  call->callable = Object::borrow(item(tuple, 1));
  PyObject *args = item(tuple, 2), *kwargs = item(tuple, 3);
  for (Py_ssize_t i = 0; i < length(args); ++i) call->args.push_back(parse_arg(item(args, i), nullptr));
  for (Py_ssize_t i = 0; i < length(kwargs); ++i)
    call->kwargs.emplace_back(Object::borrow(item(item(kwargs, i), 0)), parse_arg(item(item(kwargs, i), 1), nullptr));
  parse_results(item(tuple, 4), item(tuple, 5), *call);
  return call;
}

// (_, slots, registers, grid, device, kernel, scratch, names, (call, error, create_site, destroy_site))
std::unique_ptr<Launch> parse_launch(PyObject* tuple) {
  PyObject* functions = item(tuple, 8);
  void* site = reinterpret_cast<CreateSiteFn>(address(functions, 2))(address(tuple, 5));
  auto launch = std::make_unique<Launch>(Launch{
      reinterpret_cast<LaunchFn>(address(functions, 0)), reinterpret_cast<LaunchErrorFn>(address(functions, 1)),
      {site, reinterpret_cast<DestroySiteFn>(address(functions, 3))}, c10::Device(text(item(tuple, 4))), {}, {}, {}});
  for (int i = 0; i < 3; ++i) launch->grid[i] = static_cast<int32_t>(integer(item(tuple, 3), i));
  PyObject* scratch = item(tuple, 6);
  for (Py_ssize_t i = 0; i < length(scratch); ++i) launch->scratch.push_back(integer(scratch, i));
  PyObject* names = item(tuple, 7);
  for (Py_ssize_t i = 0; i < length(names); ++i) launch->names.push_back(text(item(names, i)));
  return launch;
}

Instruction parse_instruction(PyObject* tuple) {
  Instruction made;
  made.kind = static_cast<Instruction::Kind>(integer(tuple, 0));
  auto field = [&](Py_ssize_t i) { return static_cast<int32_t>(integer(tuple, i)); };
  switch (made.kind) {
    case Instruction::Alloc:
    case Instruction::Free:
      made.slot = field(1);
      break;
    case Instruction::Reuse:
    case Instruction::Alias:
      made.slot = field(1);
      made.source = field(2);
      made.flag = field(3) != 0;
      break;
    case Instruction::Kernel:
      made.kernel = reinterpret_cast<KernelFn>(address(tuple, 1));
      made.slots = numbers(item(tuple, 2));
      made.registers = numbers(item(tuple, 3));
      made.name = text(item(tuple, 4));
      made.message = text(item(tuple, 5));
      break;
    case Instruction::Extern:
      made.call = parse_extern(tuple);
      break;
    case Instruction::Python:
      made.call = parse_python(tuple);
      break;
    case Instruction::BindSize:
      made.reg = field(1);
      made.slot = field(2);
      made.dim = field(3);
      made.flag = field(4) != 0;
      break;
    case Instruction::Calculate:
      made.compute = parse_compute(tuple, 1);
      break;
    case Instruction::Launch:
      made.slots = numbers(item(tuple, 1));
      made.registers = numbers(item(tuple, 2));
      made.launch = parse_launch(tuple);
      made.name = text(item(tuple, 9));
      break;
    case Instruction::Check:
      made.reg = field(1);
      made.message = text(item(tuple, 2));
      made.flag = integer(tuple, 3) != 0;
      break;
    case Instruction::Pick: {
      made.reg = field(1);
      PyObject *limits = item(tuple, 2), *items = item(tuple, 3);
      for (Py_ssize_t i = 0; i < length(limits); ++i) made.limits.push_back(integer(limits, i));
      for (Py_ssize_t i = 0; i < length(items); ++i) made.items.push_back(parse_instruction(item(items, i)));
      break;
    }
  }
  return made;
}

Output parse_output(PyObject* tuple) {
  Output out;
  out.kind = static_cast<Output::Kind>(integer(tuple, 0));
  if (out.kind == Output::Tensor)
    out.view = parse_view(tuple);
  else if (out.kind == Output::Int) {
    out.reg = static_cast<int32_t>(integer(tuple, 1));
    out.number = static_cast<Number>(integer(tuple, 2));
  } else if (out.kind == Output::Argument) {
    out.argument = static_cast<int32_t>(integer(tuple, 1));
    if (integer(tuple, 2) != 1) out.object = Object::borrow(item(tuple, 2));
  } else
    out.object = Object::borrow(item(tuple, 1));
  return out;
}

// (inputs, registers, computes, slots, constants, code, outputs, mismatch, map_refused, keep_alive, current_stream,
// name, regions)
std::unique_ptr<Program> parse_program(PyObject* spec) {
  auto program = std::make_unique<Program>();
  auto each = [&](Py_ssize_t field, auto&& take) {
    PyObject* tuple = item(spec, field);
    for (Py_ssize_t i = 0; i < length(tuple); ++i) take(item(tuple, i));
  };
  each(0, [&](PyObject* o) { program->inputs.push_back(parse_input(o)); });
  each(1, [&](PyObject* o) { program->registers.push_back(integer(o)); });
  each(2, [&](PyObject* o) { program->computes.push_back(parse_compute(o, 0)); });
  each(3, [&](PyObject* o) {
    at::ScalarType dtype = scalar_type(item(o, 0));
    program->slots.push_back({dtype, static_cast<int64_t>(c10::elementSize(dtype)), numbers(item(o, 1)), numbers(item(o, 2)),
                              static_cast<int32_t>(integer(o, 3)), c10::Device(text(item(o, 4)))});
  });
  each(4, [&](PyObject* o) {
    TORCH_CHECK(THPVariable_Check(item(o, 1)), "kgen runtime: a constant is no tensor");
    program->constants.emplace_back(static_cast<int32_t>(integer(o, 0)), THPVariable_Unpack(item(o, 1)));
  });
  each(5, [&](PyObject* o) {
    program->code.push_back(parse_instruction(o));
    program->note(program->code.back());
  });
  each(6, [&](PyObject* o) { program->outputs.push_back(parse_output(o)); });
  std::vector<bool> seen(program->slots.size());
  for (size_t i = program->outputs.size(); i-- > 0;) {
    Output& out = program->outputs[i];
    if (out.kind == Output::Tensor) {
      out.last = !seen[out.view.slot];
      seen[out.view.slot] = true;
    }
  }
  program->mismatch = Object::borrow(item(spec, 7));
  program->map_refused = Object::borrow(item(spec, 8));
  program->keep_alive = Object::borrow(item(spec, 9));
  program->current_stream = reinterpret_cast<StreamFn>(address(spec, 10));
  program->name = text(item(spec, 11));
  program->regions = integer(spec, 12) != 0;
  return program;
}

}  // namespace
