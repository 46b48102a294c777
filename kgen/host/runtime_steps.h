// Calls whose arguments and results are tensors alone: the iterations of a loop, with nothing of Python in them.
#pragma once

#include <ATen/ops/clone.h>

#include "runtime_calls.h"

namespace {

// Whether a program can be stepped: it takes tensors and gives tensors, on the CPU, where a step costs less than to get there.
bool can_step(const Program& program) {
  for (const Input& input : program.inputs)
    if (input.kind == Input::Int) return false;
  for (const SlotSpec& slot : program.slots)
    if (!slot.device.is_cpu()) return false;
  for (const Output& out : program.outputs) {
    const bool none = out.kind == Output::Const && out.object.ptr == Py_None;
    const bool same = out.kind == Output::Argument && !out.object.ptr;
    if (out.kind != Output::Tensor && !none && !same) return false;
  }
  return true;
}

bool names(const Arg& arg, int32_t slot) {
  if (arg.kind == Arg::Tensor) return arg.view.slot == slot;
  for (const Arg& one : arg.items)
    if (names(one, slot)) return true;
  return false;
}

bool names(const Call& call, int32_t slot) {
  for (const Arg& arg : call.args)
    if (names(arg, slot)) return true;
  for (const auto& [_, arg] : call.kwargs)
    if (names(arg, slot)) return true;
  return false;
}

// The slot of a result that may be put anywhere, else -1: it has memory of its own, which kernels alone touch before it is given.
int32_t movable(const Program& program, size_t position) {
  const Output& out = program.outputs[position];
  if (out.kind != Output::Tensor || !out.view.own) return -1;
  const int32_t slot = out.view.slot;
  for (const Output& other : program.outputs)
    if (&other != &out && other.kind == Output::Tensor && other.view.slot == slot) return -1;
  bool made = false;
  for (const Instruction& item : program.code) {
    const bool shares = item.kind == Instruction::Alias || item.kind == Instruction::Reuse;
    if (shares && item.source == slot) return -1;
    if (item.call && names(*item.call, slot)) return -1;
    made |= item.kind == Instruction::Alloc && item.slot == slot;
  }
  return made ? slot : -1;
}

// ---- where results go

bool Frame::fits(const Destination& wanted) const {
  const SlotSpec& spec = program_.slots[wanted.slot];
  const at::Tensor& tensor = wanted.tensor;
  Dims sizes, strides;
  dims(spec.sizes, sizes);
  dims(spec.strides, strides);
  return regs_[spec.offset] == 0 && tensor.scalar_type() == spec.dtype && tensor.sizes() == c10::IntArrayRef(sizes) &&
         tensor.strides() == c10::IntArrayRef(strides);
}

const Destination* Frame::destination(int32_t slot) const {
  for (const Destination& one : destinations_)
    if (one.slot == slot && fits(one)) return &one;
  return nullptr;
}

// ---- one step

void Frame::take_tensors(const at::Tensor* args) {
  for (size_t i = 0; i < program_.inputs.size(); ++i)
    for (const Bind& bind : program_.inputs[i].binds)
      regs_[bind.reg] = bind.stride ? args[i].strides()[bind.dim] : args[i].sizes()[bind.dim];
  for (const Compute& item : program_.computes) compute(item, regs_.data());
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const Input& input = program_.inputs[i];
    if (input.kind != Input::Tensor) continue;
    if ((input.aligned && !is_aligned(args[i])) || args[i].is_neg()) {
      adopt(input.slot, copied_input(input, args[i]));
    } else if (input.only_kernels) {
      point(input.slot, args[i]);  // the caller keeps it
    } else {
      adopt(input.slot, args[i]);
    }
  }
}

at::Tensor Frame::tensor_of(const Output& out, const at::Tensor* args) {
  if (out.kind == Output::Argument) return args[out.argument];
  if (out.kind == Output::Const) return at::Tensor();
  const Slot& slot = slots_[out.view.slot];
  if (const Destination* wanted = destination(out.view.slot); wanted && slot.data == wanted->tensor.const_data_ptr())
    return wanted->tensor;
  at::Tensor made = out.last ? give(out.view) : view(out.view);
  const bool borrowed = slot.root >= 0 && destination(slot.root) != nullptr;  // memory that somebody else will overwrite
  return borrowed ? at::clone(made) : made;
}

// Runs on `args`. Results come in `outs`, undefined ones for None, and in `wanted` where that is possible.
void Frame::step(const at::Tensor* args, c10::ArrayRef<Destination> wanted, std::vector<at::Tensor>& outs, Gil& gil) {
  destinations_ = wanted;
  take_tensors(args);
  for (const auto& [slot, tensor] : program_.constants) adopt(slot, tensor);
  execute(gil);
  for (const Moved& moved : moved_) put_back(moved);
  outs.clear();
  for (const Output& out : program_.outputs) outs.push_back(tensor_of(out, args));
}

// Tensors of one kind for the results of steps: one that nobody has any more is used again.
class Spare {
 public:
  at::Tensor like(const at::Tensor& wanted) {
    for (const at::Tensor& one : tensors_)
      if (one.use_count() == 1 && one.storage().use_count() == 1) return one;
    tensors_.push_back(at::empty_strided(wanted.sizes(), wanted.strides(), wanted.options()));
    return tensors_.back();
  }

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace
