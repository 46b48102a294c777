// What a call does on a GPU: the current device and stream, launches, and copies of inputs whose data is misaligned.
#pragma once

#include "runtime_frame.h"

namespace {

// Makes a CUDA device current and asks for its current stream, which is the one that the allocator hands memory out for.
void Frame::enter(c10::Device device) {
  if (device_ == device.index() || device.is_cpu()) return;
  device_guard_.reset_device(device);
  TORCH_CHECK(program_.current_stream && program_.current_stream(device.index(), &stream_) == 0,
              "kgen runtime: torch gives no current stream for ", device.str());
  device_ = device.index();
}

C10_NOINLINE c10::DataPtr Frame::allocate_on(c10::Device device, int64_t bytes) {
  enter(device);
  return c10::GetAllocator(device.type())->allocate(static_cast<size_t>(bytes));
}

C10_NOINLINE void Frame::launch(const Instruction& item, void** ptrs, int64_t* ints) {
  const Launch& launch = *item.launch;
  arguments(item, ptrs, ints);
  enter(launch.device);
  int64_t grid[3];
  for (int i = 0; i < 3; ++i) grid[i] = regs_[launch.grid[i]];
  c10::SmallVector<c10::DataPtr, 2> scratch;  // given back right after the launch: the next user comes later on the stream
  c10::SmallVector<void*, 2> scratch_ptrs;
  for (int64_t bytes : launch.scratch) {
    bytes *= std::max<int64_t>(grid[0], 0) * std::max<int64_t>(grid[1], 0) * std::max<int64_t>(grid[2], 0);
    if (bytes > 0) scratch.push_back(c10::GetAllocator(launch.device.type())->allocate(static_cast<size_t>(bytes)));
    scratch_ptrs.push_back(bytes > 0 ? scratch.back().get() : nullptr);
  }
  const int device = std::max<int>(launch.device.index(), 0);
  const int status = launch.call(launch.site.get(), device, stream_, ptrs, ints, grid, scratch_ptrs.data());
  TORCH_CHECK(status == 0 || status > 1, launch.error());
  if (status > 1) throw MapRefused{launch, static_cast<size_t>(status - 2), launch.error()};
}

// ---- inputs that are misaligned, or negated -----------------------------------------------------------------------------------------

int64_t bytes_before(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr()) - static_cast<const char*>(tensor.storage().data());
}

// The bytes [first, second) from the tensor's data that the program may read, within the tensor's storage.
std::pair<int64_t, int64_t> Frame::bytes_read(const Input& input, const at::Tensor& tensor) const {
  const int64_t start = bytes_before(tensor);
  const int64_t end = static_cast<int64_t>(tensor.storage().nbytes()) - start;
  if (!input.aligned || !input.all_known) return {-start, end};  // readings are noted of aligned inputs alone
  const SlotSpec& own = program_.slots[input.slot];
  const int64_t origin = regs_[own.offset] * own.itemsize;
  int64_t first = 0, last = 0;
  for (const Geometry& reading : input.readings) {
    int64_t low = regs_[reading.offset], high = low + 1;
    bool empty = false;
    for (size_t d = 0; d < reading.sizes.size(); ++d) {
      const int64_t reach = (regs_[reading.sizes[d]] - 1) * regs_[reading.strides[d]];
      empty |= regs_[reading.sizes[d]] <= 0;
      (reach < 0 ? low : high) += reach;
    }
    if (empty) continue;
    first = std::min(first, low * reading.itemsize - origin);
    last = std::max(last, high * reading.itemsize - origin);
  }
  return {std::max(first, -start), std::min(last, end)};
}

// The bytes [begin, end) of a storage as a tensor: any dtype, and elements that share memory, are copied as they lie.
at::Tensor raw_bytes(const at::Tensor& tensor, int64_t begin, int64_t end) {
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), backend_keys(tensor.device().type()), c10::scalarTypeToTypeMeta(at::ScalarType::Byte));
  bytes.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{end - begin}, c10::IntArrayRef{1}, begin);
  return bytes;
}

// A tensor of the same geometry whose data begins at a multiple of 16, with the bytes [first, last) from the data copied.
at::Tensor copy_aligned(const at::Tensor& tensor, int64_t first, int64_t last) {
  DispatchGuards guards;
  const int64_t start = bytes_before(tensor);
  const int64_t front = (-first + 15) / 16 * 16;  // where the data comes to lie
  at::Tensor memory = at::empty_strided({front + last}, {1}, tensor.options().dtype(at::ScalarType::Byte));
  raw_bytes(memory, front + first, front + last).copy_(raw_bytes(tensor, start + first, start + last));
  at::Tensor copy =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.storage()), tensor.key_set(), tensor.dtype());
  copy.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    front / static_cast<int64_t>(tensor.itemsize()));
  return copy;
}

at::Tensor aligned_result(at::Tensor tensor) {
  if (!tensor.defined() || is_aligned(tensor)) return tensor;
  int64_t last = tensor.numel() != 0;
  for (int64_t d = 0; last && d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return copy_aligned(tensor, 0, last * static_cast<int64_t>(tensor.itemsize()));
}

// Kernels read memory, where a tensor with the negative bit (`x.conj().imag`) has its elements with the other sign.
void resolve_neg(const at::Tensor& copy, int64_t first, int64_t last) {
  if (!copy.is_neg()) return;
  DispatchGuards guards;
  copy._set_neg(false);
  const int64_t itemsize = static_cast<int64_t>(copy.itemsize());
  at::Tensor elements = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(copy.storage()), copy.key_set(), copy.dtype());
  elements.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{(last - first) / itemsize}, c10::IntArrayRef{1},
                                                        copy.storage_offset() + first / itemsize);
  elements.neg_();
}

C10_NOINLINE at::Tensor Frame::copied_input(const Input& input, const at::Tensor& tensor) {
  const auto [first, last] = bytes_read(input, tensor);
  moved_.push_back({&input, tensor, copy_aligned(tensor, first, last)});
  resolve_neg(moved_.back().copy, first, last);
  return moved_.back().copy;
}

C10_NOINLINE void Frame::put_back(const Moved& moved) {
  if (moved.input->mutated) {
    DispatchGuards guards;
    at::Tensor(moved.original).copy_(moved.copy);
  }
  // Results that are views of the input must be views of the caller's tensor.
  const int32_t slot = moved.input->slot;
  Slot& root = slots_[slot];
  if (root.holders == 0) return;
  for (Slot& other : slots_)
    if (other.root == slot) other.tensor.reset();
  root.storage = c10::Storage();
  const int32_t holders = root.holders;
  const bool holds = root.holds;
  adopt(slot, moved.original);
  root.holders = holders;
  root.holds = holds;
}

}  // namespace
