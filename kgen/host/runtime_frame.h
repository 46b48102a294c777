// The state of one call: registers, slots, their memory, and tensors made of it.
#pragma once

#include "runtime_blocks.h"
#include "runtime_program.h"

#include <c10/core/DeviceGuard.h>

namespace {

// ---- one call ---------------------------------------------------------------------------------------------------------

int64_t power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  for (; exponent > 0; --exponent) result *= base;
  return result;
}

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  int64_t quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

// As Python's %: the result has the divisor's sign.
double python_mod(double a, double b) {
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return (rest < 0) != (b < 0) ? rest + b : rest;
}

// As Python's round(x, digits): the exact decimal value is rounded, ties to even.
double round_decimal(double x, int digits) {
  if (!std::isfinite(x) || digits > 323) return x;
  if (digits < -308) return std::copysign(0.0, x);
  if (digits < 0) {
    const double unit = std::pow(10.0, -digits), rest = std::fmod(std::abs(x), unit), below = std::abs(x) - rest;
    const bool odd = std::fmod(below, 2 * unit) != 0;
    return std::copysign(rest > unit / 2 || (rest == unit / 2 && odd) ? below + unit : below, x);
  }
  char text[700];
  const auto written = std::to_chars(text, text + sizeof text, x, std::chars_format::fixed, digits);
  double rounded = x;
  std::from_chars(text, written.ptr, rounded);
  return rounded;
}

void compute(const Compute& item, int64_t* regs) {
  const int64_t a = regs[item.a], b = regs[item.b];
  const double x = std::bit_cast<double>(a), y = std::bit_cast<double>(b);
  int64_t& out = regs[item.dst];
  auto bits = [](double value) { return std::bit_cast<int64_t>(value); };
  switch (item.op) {
    case ComputeOp::Add: out = a + b; break;
    case ComputeOp::Sub: out = a - b; break;
    case ComputeOp::Mul: out = a * b; break;
    case ComputeOp::FloorDiv: out = floor_div(a, b); break;
    case ComputeOp::Mod: out = a - floor_div(a, b) * b; break;
    case ComputeOp::Min: out = std::min(a, b); break;
    case ComputeOp::Max: out = std::max(a, b); break;
    case ComputeOp::Pow: out = power(a, b); break;
    case ComputeOp::Shl: out = a << b; break;
    case ComputeOp::Shr: out = a >> b; break;
    case ComputeOp::And: out = a & b; break;
    case ComputeOp::Or: out = a | b; break;
    case ComputeOp::Xor: out = a ^ b; break;
    case ComputeOp::Lt: out = a < b; break;
    case ComputeOp::Le: out = a <= b; break;
    case ComputeOp::Eq: out = a == b; break;
    case ComputeOp::Select: out = a ? b : regs[item.c]; break;
    case ComputeOp::Float: out = bits(static_cast<double>(a)); break;
    case ComputeOp::FAdd: out = bits(x + y); break;
    case ComputeOp::FMul: out = bits(x * y); break;
    case ComputeOp::FDiv: out = bits(x / y); break;
    case ComputeOp::FPow: out = bits(std::pow(x, y)); break;
    case ComputeOp::FMin: out = bits(std::min(x, y)); break;
    case ComputeOp::FMax: out = bits(std::max(x, y)); break;
    case ComputeOp::FLt: out = x < y; break;
    case ComputeOp::FLe: out = x <= y; break;
    case ComputeOp::FEq: out = x == y; break;
    case ComputeOp::FTrunc: out = static_cast<int64_t>(x); break;
    case ComputeOp::FFloor: out = static_cast<int64_t>(std::floor(x)); break;
    case ComputeOp::FCeil: out = static_cast<int64_t>(std::ceil(x)); break;
    case ComputeOp::FRound: out = static_cast<int64_t>(std::nearbyint(x)); break;  // ties to even, as Python
    case ComputeOp::FSqrt: out = bits(std::sqrt(x)); break;
    case ComputeOp::FExp: out = bits(std::exp(x)); break;
    case ComputeOp::FLog: out = bits(std::log(x)); break;
    case ComputeOp::FLog2: out = bits(std::log2(x)); break;
    case ComputeOp::FSin: out = bits(std::sin(x)); break;
    case ComputeOp::FCos: out = bits(std::cos(x)); break;
    case ComputeOp::FTan: out = bits(std::tan(x)); break;
    case ComputeOp::FAsin: out = bits(std::asin(x)); break;
    case ComputeOp::FAcos: out = bits(std::acos(x)); break;
    case ComputeOp::FAtan: out = bits(std::atan(x)); break;
    case ComputeOp::FSinh: out = bits(std::sinh(x)); break;
    case ComputeOp::FCosh: out = bits(std::cosh(x)); break;
    case ComputeOp::FTanh: out = bits(std::tanh(x)); break;
    case ComputeOp::FAsinh: out = bits(std::asinh(x)); break;
    case ComputeOp::FMod: out = bits(python_mod(x, y)); break;
    case ComputeOp::FRoundDec: out = bits(round_decimal(x, static_cast<int>(y))); break;
  }
}

// One slot of a running call. Memory lives in its root: the slot that made it, itself unless an alias or a reuse.
struct Slot {
  char* base = nullptr;  // of the slot's frame of reference: element 0
  char* data = nullptr;  // base + the slot's own offset
  int32_t root = -1;
  bool holds = false;
  at::Tensor tensor;  // the slot's own geometry; always there for inputs, constants and results of calls
  // Of a root only:
  bool absent = false;  // a call returned None
  int32_t holders = 0;
  int64_t nbytes = 0;  // from base
  c10::DataPtr memory;
  c10::Storage storage;  // made of `memory` when a tensor is first needed
};

struct Gil {  // released between construction and the end of its scope, except inside `acquire`
  PyThreadState* saved = PyEval_SaveThread();
  ~Gil() { acquire(); }
  void acquire() {
    if (saved) PyEval_RestoreThread(std::exchange(saved, nullptr));
  }
  void release() { saved = PyEval_SaveThread(); }
};

// An input whose data is misaligned: the call runs on a copy.
struct Moved {
  const Input* input;
  at::Tensor original, copy;
};

struct DispatchGuards {  // the graph is what AOTAutograd left below autograd and autocast
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Where a step puts a result, instead of into memory that it allocates.
struct Destination {
  int32_t slot;
  at::Tensor tensor;
};

class Frame {
 public:
  explicit Frame(const Program& program)
      : program_(program), regs_(program.registers.begin(), program.registers.end()) {
    slots_.resize(program.slots.size());
  }

  PyObject* run(PyObject* boxed);
  void step(const at::Tensor* args, c10::ArrayRef<Destination> wanted, std::vector<at::Tensor>& outs, Gil& gil);

 private:
  void bind(PyObject* const* args, Py_ssize_t count);
  void check_inputs(PyObject* const* args) const;
  void execute(Gil& gil);
  const Instruction& picked(const Instruction& item) const;
  void fail(size_t position, const std::string& actual, const std::string& expected) const;
  [[noreturn]] void fail(const MapRefused& refused) const;
  [[noreturn]] static void raise(Object made);
  std::string expected(const Input& input) const;

  void dims(const Regs& from, Dims& to) const {
    to.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = regs_[from[i]];
  }
  int64_t bytes_of(const SlotSpec& spec) const;
  void place(int32_t slot, char* base, int32_t root);
  void take_inputs(PyObject* const* args);
  void adopt(int32_t slot, at::Tensor tensor);
  void point(int32_t slot, const at::Tensor& tensor);
  at::Tensor in_expected_layout(const Result& out, at::Tensor tensor, const char* source) const;
  at::Tensor copied_input(const Input& input, const at::Tensor& tensor);
  std::pair<int64_t, int64_t> bytes_read(const Input& input, const at::Tensor& tensor) const;
  void put_back(const Moved& moved);
  void allocate(int32_t slot);
  void reuse(int32_t slot, int32_t source);
  void alias(int32_t slot, int32_t source, bool same_geometry);
  void free(int32_t slot);

  const c10::Storage& storage(Slot& root);
  at::Tensor make(int32_t slot, at::ScalarType dtype, const Regs& sizes, const Regs& strides, int32_t offset);
  const at::Tensor& own(int32_t slot);
  bool is_as_promised(const SlotSpec& spec, const at::Tensor& tensor) const;
  at::Tensor view(const View& view);
  at::Tensor give(const View& view);

  void arguments(const Instruction& item, void** ptrs, int64_t* ints) const;
  void kernel(const Instruction& item, void** ptrs, int64_t* ints, int threads) const;
  void enter(c10::Device device);
  c10::DataPtr allocate_on(c10::Device device, int64_t bytes);
  void launch(const Instruction& item, void** ptrs, int64_t* ints);
  void call_boxed(const Call& call, Stack& stack);
  void call_python(const Call& call);
  IValue boxed(const Arg& arg);
  IValue boxed_list(const Arg& arg);
  Object python(const Arg& arg);
  void take(const Call& call, size_t position, at::Tensor tensor);
  void take_integer(const Call& call, size_t position, int64_t value);
  PyObject* output(const Output& out);
  PyObject* argument(const Output& out);

  bool fits(const Destination& wanted) const;
  const Destination* destination(int32_t slot) const;
  void take_tensors(const at::Tensor* args);
  at::Tensor tensor_of(const Output& out, const at::Tensor* args);

  const Program& program_;
  // On the stack for small graphs: a block this large from the heap makes malloc sort all its small ones.
  c10::SmallVector<int64_t, 64> regs_;
  c10::SmallVector<Slot, 32> slots_;
  c10::SmallVector<Object, 16> borrowed_;  // inputs that the caller keeps anyway
  std::vector<Object> returned_;       // inputs that are outputs as they are, in the order of these outputs
  size_t next_returned_ = 0;
  std::vector<Moved> moved_;
  c10::ArrayRef<Destination> destinations_;  // of a step
  // Of a GPU graph: the device that is current for this call, and the stream that its caller works on.
  c10::OptionalDeviceGuard device_guard_;
  c10::DeviceIndex device_ = -1;
  void* stream_ = nullptr;
};

// ---- inputs

std::string describe(const at::Tensor& tensor) {
  const std::string device = tensor.device().str();
  if (tensor.layout() != at::kStrided) return c10::str(tensor.dtype(), " with sizes ", tensor.sizes(), " and layout ", tensor.layout(), " on ", device);
  return c10::str(tensor.dtype(), " with sizes ", tensor.sizes(), " and strides ", tensor.strides(), " on ", device);
}

// What kernels cannot see of a tensor, or nullptr. Zero tensors have no memory either, and get some.
const char* unreadable(const at::Tensor& tensor) {
  if (tensor._fw_grad(0).defined()) return "a tensor with a tangent of forward-mode differentiation, which kernels do not read";
  if (tensor.layout() != at::kStrided || tensor.is_meta() || tensor.numel() == 0 || tensor._is_zerotensor()) return nullptr;
  if (tensor.has_storage() && tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get()) return nullptr;
  return "a tensor without memory, as those of FakeTensorMode and batches of vmap or is_grads_batched are";
}

std::string Frame::expected(const Input& input) const {
  auto list = [&](const Regs& regs) {
    std::string out = "[";
    for (size_t i = 0; i < regs.size(); ++i)
      out += (i ? ", " : "") + (regs[i] < 0 ? std::string("any") : std::to_string(regs_[regs[i]]));
    return out + "]";
  };
  std::string out = c10::str(c10::scalarTypeToTypeMeta(input.dtype), " with sizes ", list(input.sizes));
  if (input.check_strides) out += " and strides " + list(input.strides);
  return out + " on " + input.device.str();
}

void Frame::fail(size_t position, const std::string& actual, const std::string& expected) const {
  raise(checked(PyObject_CallFunction(
      program_.mismatch.ptr, "nss", static_cast<Py_ssize_t>(position), actual.c_str(), expected.c_str())));
}

void Frame::fail(const MapRefused& refused) const {
  const std::vector<std::string>& names = refused.launch.names;
  raise(checked(PyObject_CallFunction(
      program_.map_refused.ptr, "sss", names[0].c_str(), names[1 + refused.map].c_str(), refused.problem.c_str())));
}

void Frame::raise(Object made) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr)), made.ptr);
  python_error error;
  error.persist();
  throw error;
}

void Frame::bind(PyObject* const* args, Py_ssize_t count) {
  const size_t wanted = program_.inputs.size();
  if (static_cast<size_t>(count) != wanted)
    fail(0, c10::str("come in a list of ", count), c10::str("a list of ", wanted));
  for (size_t i = 0; i < wanted; ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind == Input::Int) {
      if (!PyLong_Check(args[i])) fail(i, c10::str("type ", Py_TYPE(args[i])->tp_name), "an int");
      const int64_t value = integer(args[i]);
      if (!input.check) regs_[input.reg] = value;
    } else if (input.kind == Input::Tensor) {
      if (!THPVariable_Check(args[i])) fail(i, c10::str("type ", Py_TYPE(args[i])->tp_name), "a tensor");
      const at::Tensor& tensor = THPVariable_Unpack(args[i]);
      if (static_cast<size_t>(tensor.dim()) != input.sizes.size()) fail(i, describe(tensor), expected(input));
      for (const Bind& bind : input.binds)
        regs_[bind.reg] = bind.stride ? tensor.strides()[bind.dim] : tensor.sizes()[bind.dim];
    }
  }
}

// After the computes: what an input is held to may be a function of other inputs' sizes.
void Frame::check_inputs(PyObject* const* args) const {
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind == Input::Int && input.check) {
      const int64_t value = integer(args[i]);
      if (value != regs_[input.reg]) fail(i, c10::str("the value ", value), c10::str(regs_[input.reg]));
    }
    if (input.kind != Input::Tensor) continue;
    const at::Tensor& tensor = THPVariable_Unpack(args[i]);
    bool same = input.passed_on || (tensor.scalar_type() == input.dtype && tensor.device() == input.device);
    same &= !input.check_strides || tensor.layout() == at::kStrided;  // mkldnn tensors are traced as strided ones
    const auto sizes = tensor.sizes();
    for (size_t d = 0; d < sizes.size(); ++d) same &= input.sizes[d] < 0 || regs_[input.sizes[d]] == sizes[d];
    if (input.check_strides && same && tensor.numel() != 0) {
      const auto strides = tensor.strides();
      for (size_t d = 0; d < sizes.size(); ++d)
        same &= input.strides[d] < 0 || sizes[d] == 1 || regs_[input.strides[d]] == strides[d];
    }
    if (!same) fail(i, describe(tensor), expected(input));
    if (const char* kind = unreadable(tensor); kind && !input.passed_on) fail(i, kind, expected(input));
  }
}

// ---- memory

int64_t Frame::bytes_of(const SlotSpec& spec) const {
  int64_t last = regs_[spec.offset];
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    const int64_t size = regs_[spec.sizes[d]];
    if (size <= 0) return 0;
    last += (size - 1) * regs_[spec.strides[d]];
  }
  return (last + 1) * spec.itemsize;
}

void Frame::place(int32_t slot, char* base, int32_t root) {
  Slot& made = slots_[slot];
  const SlotSpec& spec = program_.slots[slot];
  made.base = base;
  made.data = base ? base + regs_[spec.offset] * spec.itemsize : nullptr;
  made.root = root;
  made.holds = true;
}

bool is_aligned(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

// An input that somebody besides the list refers to outlives the call whatever we do, so a Python reference is enough for kernels.
// A second C++ reference is dear: torch then locks the interpreter to keep the Python object alive, and again to let it go.
void Frame::take_inputs(PyObject* const* args) {
  for (const Output& out : program_.outputs)
    if (out.kind == Output::Argument) returned_.push_back(Object::borrow(args[out.argument]));
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind != Input::Tensor) continue;
    const at::Tensor& tensor = THPVariable_Unpack(args[i]);
    if (tensor._is_zerotensor()) {  // it has no memory, and a tensor of its sizes has
      adopt(input.slot, at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).zero_());
    } else if ((input.aligned && !is_aligned(tensor)) || tensor.is_neg()) {
      adopt(input.slot, copied_input(input, tensor));
    } else if (input.only_kernels && Py_REFCNT(args[i]) > 1) {
      borrowed_.push_back(Object::borrow(args[i]));
      point(input.slot, tensor);
    } else {
      adopt(input.slot, tensor);
    }
  }
}

void Frame::adopt(int32_t slot, at::Tensor tensor) {
  point(slot, tensor);
  slots_[slot].absent = !tensor.defined();
  slots_[slot].tensor = std::move(tensor);
}

// Makes the slot a root on the tensor's memory.
void Frame::point(int32_t slot, const at::Tensor& tensor) {
  const SlotSpec& spec = program_.slots[slot];
  char* base = nullptr;
  if (tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage()) {
    // Mutable: a lazily cloned storage must be copied before a kernel may write to it.
    base = static_cast<char*>(tensor.mutable_data_ptr());
    if (base) base -= regs_[spec.offset] * spec.itemsize;
    slots_[slot].nbytes = static_cast<int64_t>(tensor.storage().nbytes()) -
                          (tensor.storage_offset() - regs_[spec.offset]) * static_cast<int64_t>(tensor.itemsize());
  }
  place(slot, base, slot);
  slots_[slot].holders = 1;
}

// Whether a tensor has the type and the sizes that tracing said.
bool Frame::is_as_promised(const SlotSpec& spec, const at::Tensor& tensor) const {
  Dims sizes;
  dims(spec.sizes, sizes);
  return tensor.scalar_type() == spec.dtype && tensor.sizes() == c10::IntArrayRef(sizes);
}

// Kernels were compiled for the strides that the fake tensors promised. Where the real operator differs, a copy puts it right.
// Other sizes or another type are an error if a kernel may read them; what is passed on goes as it is, as in eager.
at::Tensor Frame::in_expected_layout(const Result& out, at::Tensor tensor, const char* source) const {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return tensor;
  const SlotSpec& spec = program_.slots[out.slot];
  Dims sizes, strides;
  dims(spec.sizes, sizes);
  dims(spec.strides, strides);
  if (!is_as_promised(spec, tensor)) {
    TORCH_CHECK(out.passed_on, source, " returned ", describe(tensor), ", but tracing promised ",
                c10::scalarTypeToTypeMeta(spec.dtype), " with sizes ", c10::IntArrayRef(sizes));
    return tensor;
  }
  bool same = true;
  if (tensor.numel() != 0)
    for (size_t d = 0; d < sizes.size(); ++d) same &= sizes[d] == 1 || tensor.strides()[d] == strides[d];
  if (same) return tensor;
  at::Tensor copy = at::empty_strided(sizes, strides, tensor.options());
  copy.copy_(tensor);
  return copy;
}

void Frame::allocate(int32_t slot) {
  Slot& made = slots_[slot];
  const SlotSpec& spec = program_.slots[slot];
  made.nbytes = bytes_of(spec);
  if (const Destination* wanted = destination(slot)) {
    made.memory = c10::DataPtr(wanted->tensor.mutable_data_ptr(), spec.device);
  } else {
    made.memory = spec.device.is_cpu() ? allocate_bytes(made.nbytes) : allocate_on(spec.device, made.nbytes);
  }
  made.holders = 1;
  place(slot, static_cast<char*>(made.memory.get()), slot);
}

void Frame::reuse(int32_t slot, int32_t source) {
  Slot& from = slots_[source];
  const int64_t needed = bytes_of(program_.slots[slot]);
  const int64_t there = slots_[from.root].nbytes;
  TORCH_CHECK(needed <= there, "kgen runtime: slot ", slot, " needs ", needed, " bytes, slot ", source, " has ", there);
  place(slot, from.base, from.root);
  from.holds = false;
}

void Frame::alias(int32_t slot, int32_t source, bool same_geometry) {
  Slot& from = slots_[source];
  place(slot, from.base, from.root);
  ++slots_[from.root].holders;
  if (same_geometry) slots_[slot].tensor = from.tensor;
}

void Frame::free(int32_t slot) {
  Slot& dead = slots_[slot];
  if (!dead.holds) return;
  dead.holds = false;
  if (slot != dead.root) dead.tensor.reset();
  Slot& root = slots_[dead.root];
  if (--root.holders > 0) return;
  root.tensor.reset();
  root.storage = c10::Storage();
  root.memory.clear();
}

// ---- tensors

const c10::Storage& Frame::storage(Slot& root) {
  if (!root.storage) {
    if (root.tensor.defined()) {
      root.storage = root.tensor.storage();
    } else {
      const c10::DeviceType device = root.memory.device().type();
      c10::Allocator* allocator = device == c10::DeviceType::CPU ? c10::GetCPUAllocator() : c10::GetAllocator(device);
      root.storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(root.nbytes), std::move(root.memory), allocator,
          /*resizable=*/true));
    }
  }
  return root.storage;
}

c10::DispatchKeySet backend_keys(c10::DeviceType device) {  // of what `allocate` can make
  constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU), cuda(c10::DispatchKey::CUDA);
  return device == c10::DeviceType::CPU ? cpu : cuda;
}

at::Tensor Frame::make(int32_t slot, at::ScalarType dtype, const Regs& sizes, const Regs& strides, int32_t offset) {
  Slot& root = slots_[slots_[slot].root];
  const int64_t itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t start = regs_[offset];
  const c10::Storage& memory = storage(root);
  if (root.base) {
    const int64_t shift = root.base - static_cast<const char*>(memory.data());
    TORCH_CHECK(shift % itemsize == 0, "kgen runtime: a view of slot ", slot, " is not aligned to its dtype");
    start += shift / itemsize;
  }
  Dims size_values, stride_values;
  dims(sizes, size_values);
  dims(strides, stride_values);
  c10::DispatchKeySet keys = backend_keys(memory.device_type());
  if (const at::Tensor& tensor = root.tensor; tensor.defined()) {
    if (tensor.scalar_type() == dtype && tensor.storage_offset() == start && tensor.sizes() == c10::IntArrayRef(size_values) &&
        tensor.strides() == c10::IntArrayRef(stride_values))
      return tensor;  // so a mutated input that is also an output comes back as the caller's own tensor
    keys = tensor.key_set();
  }
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory), keys, c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size_values, stride_values, start);
  return made;
}

const at::Tensor& Frame::own(int32_t slot) {
  Slot& state = slots_[slot];
  if (!state.tensor.defined() && !slots_[state.root].absent) {
    const SlotSpec& spec = program_.slots[slot];
    state.tensor = make(slot, spec.dtype, spec.sizes, spec.strides, spec.offset);
  }
  return state.tensor;
}

// A tensor for the last output that is of this slot. The frame keeps no reference where it can: see take_inputs.
at::Tensor Frame::give(const View& wanted) {
  const Slot& root = slots_[slots_[wanted.slot].root];
  if (!wanted.own || root.holders != 1) return view(wanted);
  own(wanted.slot);
  return std::move(slots_[wanted.slot].tensor);
}

at::Tensor Frame::view(const View& view) {
  const at::Tensor& tensor = slots_[view.slot].tensor;
  const bool other = view.exact && tensor.defined() && !is_as_promised(program_.slots[view.slot], tensor);
  if (view.own || other) return own(view.slot);
  return make(view.slot, view.dtype, view.sizes, view.strides, view.offset);
}

}  // namespace
