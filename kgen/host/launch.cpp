// Loads GPU kernels and launches them through the CUDA driver: a C library of a few functions, compiled once per machine.
//
// A kernel is loaded once per device, into the device's primary context (the one torch uses). Its TMA descriptors are encoded
// here, for the addresses and sizes of each launch.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "launch_driver.h"

namespace {

// ---- kernels ------------------------------------------------------------------------------------------------------------

// What a parameter is. A launch gives a map (a TMA descriptor, encoded here) one pointer and 1 + 2 * rank integers: offset,
// sizes, strides, in elements. The kernel gets the descriptor, 32-bit sizes and 64-bit strides.
enum class Kind : uint8_t { Pointer, Int32, Int64, Map };

constexpr int kMaxRank = 5;

struct Format {  // MapFormat in kgen/rendered/tensor_map.py
  int32_t rank, element, element_bytes, swizzle, box[kMaxRank], steps[kMaxRank];
};

struct Parameter {
  Kind kind;
  bool divisible;  // compiled for multiples of 16
  // What a launch gives for it.
  uint8_t pointers, integers;
};

constexpr int kMaxDevices = 64;

struct Loaded {
  CUcontext context = nullptr;
  CUmodule module = nullptr;
  std::atomic<CUfunction> function{nullptr};  // set last: whoever sees it sees the rest
};

struct Kernel {
  std::string name, function, image;
  unsigned threads, shared;
  std::vector<Parameter> parameters;
  std::vector<Format> formats;  // of the maps in order
  size_t arguments = 0;         // parameters in machine code, scratch included
  int scratch;
  bool early;  // waits for the kernel before by itself
  std::mutex loading;
  Loaded loaded[kMaxDevices];
};

struct RelaxedCapture {  // loading is allowed while a stream of this thread is being captured
  int mode = kRelaxedCapture;
  RelaxedCapture() { driver.cuThreadExchangeStreamCaptureMode(&mode); }
  ~RelaxedCapture() { driver.cuThreadExchangeStreamCaptureMode(&mode); }
};

struct InContext {
  explicit InContext(CUcontext context, const std::string& what) { check(driver.cuCtxPushCurrent_v2(context), what); }
  ~InContext() {
    CUcontext popped;
    driver.cuCtxPopCurrent_v2(&popped);
  }
};

std::string naming(const Kernel& kernel, const char* action) { return std::string(action) + " kernel " + kernel.name; }

// A launch with more threads than the function's registers allow fails. While a graph is compiled something else can still be
// found; in the middle of a call it is too late.
void check_threads(const Kernel& kernel, CUfunction function, const std::string& what) {
  int most = 0;
  check(driver.cuFuncGetAttribute(&most, kMaxThreadsPerBlock, function), what);
  if (static_cast<unsigned>(most) < kernel.threads)
    throw Failure{what + ": it is launched with " + std::to_string(kernel.threads) + " threads a block, and can have " +
                  std::to_string(most)};
}

CUfunction load(Kernel& kernel, int device) {
  if (device < 0 || device >= kMaxDevices)
    throw Failure{naming(kernel, "loading") + ": there is no device " + std::to_string(device)};
  Loaded& made = kernel.loaded[device];
  if (CUfunction ready = made.function.load(std::memory_order_acquire)) return ready;
  const std::string what = naming(kernel, "loading");
  std::lock_guard<std::mutex> alone(kernel.loading);
  if (CUfunction ready = made.function.load(std::memory_order_acquire)) return ready;
  RelaxedCapture relaxed;
  CUdevice handle;
  check(driver.cuDeviceGet(&handle, device), what);
  check(driver.cuDevicePrimaryCtxRetain(&made.context, handle), what);
  InContext inside(made.context, what);
  if (!made.module) check(driver.cuModuleLoadData(&made.module, kernel.image.data()), what);
  CUfunction function;
  check(driver.cuModuleGetFunction(&function, made.module, kernel.function.c_str()), what);
  check_threads(kernel, function, what);
  if (kernel.shared > 48 * 1024)  // more than any kernel may use unasked
    check(driver.cuFuncSetAttribute(function, kMaxDynamicSharedSize, static_cast<int>(kernel.shared)), what);
  made.function.store(function, std::memory_order_release);
  return function;
}

// Numbers must be what the kernel was compiled for: it would compute with their low bits, or read at wrong addresses.
void check_arguments(const Kernel& kernel, void* const* pointers, const int64_t* integers) {
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const Parameter& parameter = kernel.parameters[i];
    const int64_t value = parameter.pointers ? reinterpret_cast<int64_t>(*pointers) : *integers;
    pointers += parameter.pointers;
    integers += parameter.integers;
    if (parameter.kind == Kind::Map) continue;
    const bool fits = parameter.kind != Kind::Int32 || value == static_cast<int32_t>(value);
    if (fits && !(parameter.divisible && value % 16 != 0)) continue;
    throw Failure{naming(kernel, "launching") + ": parameter " + std::to_string(i) + " is " + std::to_string(value) +
                  (fits ? ", which is not a multiple of 16" : ", which does not fit 32 bits")};
  }
}

// A thread that has not used the GPU yet has no context: it gets the kernel's.
template <typename Do>
CUresult with_context(Kernel& kernel, int device, Do&& act) {
  const CUresult status = act();
  if (status != kInvalidContext) return status;
  check(driver.cuCtxSetCurrent(kernel.loaded[device].context), naming(kernel, "launching"));
  return act();
}

// ---- TMA descriptors ----------------------------------------------------------------------------------------------------

struct Place {  // a tensor in memory: bytes, and numbers of elements
  char* address = nullptr;
  int64_t sizes[kMaxRank] = {}, strides[kMaxRank] = {};
  bool operator==(const Place&) const = default;
};

Place place_of(const Format& format, void* pointer, const int64_t* integers) {
  Place place;
  place.address = static_cast<char*>(pointer) + integers[0] * format.element_bytes;
  std::copy_n(integers + 1, format.rank, place.sizes);
  std::copy_n(integers + 1 + format.rank, format.rank, place.strides);
  return place;
}

template <typename Number>
std::string listed(const Number* numbers, int count) {
  std::string out = "[";
  for (int i = 0; i < count; ++i) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

// What the driver, or Triton's 32-bit sizes, cannot express; empty when there is nothing.
std::string problem_with(const Format& format, const Place& place) {
  if (reinterpret_cast<uintptr_t>(place.address) % 16 != 0) return "its address is not a multiple of 16";
  for (int d = 0; d < format.rank; ++d) {
    if (place.sizes[d] > INT32_MAX) return "size " + std::to_string(place.sizes[d]) + " does not fit 32 bits";
    if (d + 1 < format.rank && place.strides[d] * format.element_bytes % 16 != 0)
      return "a stride of " + std::to_string(place.strides[d]) + " elements is not a multiple of 16 bytes";
  }
  return "";
}

CUtensorMap encode(Kernel& kernel, int device, const Format& format, const Place& place, int number) {
  // The driver refuses tensors without elements; a kernel that loads nothing gets a descriptor that cannot be used.
  if (std::count_if(place.sizes, place.sizes + format.rank, [](int64_t size) { return size <= 0; })) return {};
  auto refuse = [&](const std::string& problem) {
    throw Failure{problem + " (sizes " + listed(place.sizes, format.rank) + ", strides " +
                      listed(place.strides, format.rank) + " of elements of " + std::to_string(format.element_bytes) +
                      " bytes, blocks of " + listed(format.box, format.rank) + ")",
                  2 + number};
  };
  if (std::string problem = problem_with(format, place); !problem.empty()) refuse(problem);
  // The driver counts dimensions from the innermost one, whose stride it knows.
  uint64_t sizes[kMaxRank], strides[kMaxRank] = {};
  uint32_t box[kMaxRank], steps[kMaxRank];
  for (int d = 0; d < format.rank; ++d) {
    const int from = format.rank - 1 - d;
    sizes[d] = static_cast<uint64_t>(place.sizes[from]);
    steps[d] = static_cast<uint32_t>(format.steps[from]);
    box[d] = static_cast<uint32_t>(format.box[from]) * steps[d];  // what is passed over counts
    if (d > 0) strides[d - 1] = static_cast<uint64_t>(place.strides[from] * format.element_bytes);
  }
  CUtensorMap made;
  const CUresult status = with_context(kernel, device, [&] {
    return driver.cuTensorMapEncodeTiled(&made, format.element, static_cast<uint32_t>(format.rank), place.address, sizes,
                                         strides, box, steps, kNoInterleave, format.swizzle, kPromoteTo128Bytes, kFillZeros);
  });
  if (status != kSuccess) refuse(described(status));
  return made;
}

// One place in a program that launches a kernel. It keeps the descriptors of its last launch: in the next call they
// are most often the same.
struct Site {
  struct Kept {
    Place place;
    CUtensorMap map;
  };
  Kernel& kernel;
  std::mutex lock;
  std::vector<Kept> kept;  // in order of the kernel's maps: at first of no tensor, with an unusable descriptor
};

void make_maps(Site& site, int device, void* const* pointers, const int64_t* integers, CUtensorMap* made) {
  std::lock_guard<std::mutex> alone(site.lock);
  int number = 0;
  for (const Parameter& parameter : site.kernel.parameters) {
    if (parameter.kind == Kind::Map) {
      Site::Kept& kept = site.kept[static_cast<size_t>(number)];
      const Format& format = site.kernel.formats[static_cast<size_t>(number)];
      const Place place = place_of(format, *pointers, integers);
      if (!(kept.place == place)) kept = {place, encode(site.kernel, device, format, place, number)};
      made[number++] = kept.map;
    }
    pointers += parameter.pointers;
    integers += parameter.integers;
  }
}

// ---- launches -----------------------------------------------------------------------------------------------------------

// Room for `count` things: on the stack up to Few.
template <typename T, size_t Few>
struct Room {
  T few[Few];
  std::unique_ptr<T[]> many;
  T* data;
  explicit Room(size_t count) : many(count > Few ? new T[count] : nullptr), data(many ? many.get() : few) {}
};

// The addresses of the parameters. That of a 64-bit integer is that of its low half as well: every platform of CUDA
// stores low bytes first.
void list_arguments(const Kernel& kernel, void** pointers, const int64_t* integers, CUtensorMap* maps, void** scratch,
                    void** next) {
  for (const Parameter& parameter : kernel.parameters) {
    if (parameter.kind == Kind::Pointer) *next++ = static_cast<void*>(pointers);
    if (parameter.kind == Kind::Map) *next++ = maps++;
    // after a map's offset, which is in its address
    for (int i = parameter.kind == Kind::Map; i < parameter.integers; ++i) *next++ = const_cast<int64_t*>(integers + i);
    pointers += parameter.pointers;
    integers += parameter.integers;
  }
  for (int i = 0; i < kernel.scratch; ++i) *next++ = static_cast<void*>(scratch++);
}

void launch(Site& site, int device, CUstream stream, void** pointers, const int64_t* integers, const int64_t* grid,
            void** scratch) {
  if (grid[0] <= 0 || grid[1] <= 0 || grid[2] <= 0) return;
  Kernel& kernel = site.kernel;
  check_arguments(kernel, pointers, integers);
  CUfunction function = load(kernel, device);
  Room<CUtensorMap, 4> maps(kernel.formats.size());
  if (!kernel.formats.empty()) make_maps(site, device, pointers, integers, maps.data);
  Room<void*, 64> arguments(kernel.arguments);
  list_arguments(kernel, pointers, integers, maps.data, scratch, arguments.data);
  auto say = [&] {
    return naming(kernel, "launching") + " on a grid of " + std::to_string(grid[0]) + " x " + std::to_string(grid[1]) +
           " x " + std::to_string(grid[2]);
  };
  if (grid[0] > INT32_MAX || grid[1] > INT32_MAX || grid[2] > INT32_MAX) throw Failure{say() + ": that is too many"};
  CUlaunchConfig config{static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2]),
                        kernel.threads, 1, 1, kernel.shared, stream, nullptr, 0};
  CUlaunchAttribute early{kSerializeByProgram, 0, {1}};
  if (kernel.early && driver.launches_early) {
    config.attributes = &early;
    config.attribute_count = 1;
  }
  const CUresult status =
      with_context(kernel, device, [&] { return driver.cuLaunchKernelEx(&config, function, arguments.data, nullptr); });
  if (status != kSuccess) check(status, say());
}

thread_local std::string last_error;

template <typename Do>
int reported(Do&& act) {
  try {
    act();
    return 0;
  } catch (const Failure& failure) {
    last_error = failure.text;
    return failure.code;
  }
}

}  // namespace

// ---- what kgen/host/launch.py and the runtime call: a result other than 0 means that kgen_launch_error() says why ----------

extern "C" {

const char* kgen_launch_error() { return last_error.c_str(); }

int kgen_open_driver(const char* path) {
  return reported([&] { open_driver(path); });
}

// Lives as long as the process: a recorded CUDA graph may launch it after whoever made it is gone.
// `kinds` has one byte for each of the kernel's own parameters: Kind, plus 128 where it is compiled for multiples of 16.
// `formats` has those of the maps in order.
void* kgen_create_kernel(const char* name, const char* function, const char* image, int64_t image_size, const uint8_t* kinds,
                         int kinds_size, const Format* formats, int threads, int shared, int scratch, int early) {
  auto made = std::make_unique<Kernel>();
  made->name = name;
  made->function = function;
  made->image.assign(image, static_cast<size_t>(image_size));
  made->threads = static_cast<unsigned>(threads);
  made->shared = static_cast<unsigned>(shared);
  made->scratch = scratch;
  made->early = early != 0;
  made->arguments = static_cast<size_t>(scratch);
  for (int i = 0; i < kinds_size; ++i) {
    const auto kind = static_cast<Kind>(kinds[i] & 127);
    uint8_t integers = kind != Kind::Pointer;
    if (kind == Kind::Map) {
      made->formats.push_back(*formats++);
      integers = static_cast<uint8_t>(1 + 2 * made->formats.back().rank);
    }
    made->arguments += kind == Kind::Pointer ? 1 : integers;  // a map itself takes the place of its offset
    made->parameters.push_back({kind, (kinds[i] & 128) != 0, kind == Kind::Pointer || kind == Kind::Map, integers});
  }
  return made.release();
}

void* kgen_create_site(void* kernel) {
  auto* launched = static_cast<Kernel*>(kernel);
  return new Site{*launched, {}, std::vector<Site::Kept>(launched->formats.size())};
}

void kgen_destroy_site(void* site) { delete static_cast<Site*>(site); }

int kgen_load_kernel(void* kernel, int device) {
  return reported([&] { load(*static_cast<Kernel*>(kernel), device); });
}

// 1 for a failure, 2 + k when the kernel's k-th descriptor cannot be encoded.
int kgen_launch(void* site, int device, void* stream, void** pointers, const int64_t* integers, const int64_t* grid,
                void** scratch) {
  return reported([&] {
    launch(*static_cast<Site*>(site), device, static_cast<CUstream>(stream), pointers, integers, grid, scratch);
  });
}

}  // extern "C"
