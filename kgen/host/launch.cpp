// Loads GPU kernels and launches them through the CUDA driver: a C library of a few functions, compiled once per machine.
//
// The driver is opened at run time and the few types that it needs are declared here, so neither CUDA's headers nor a GPU is
// needed to build this. A kernel is loaded once per device, into the device's primary context (the one torch uses).

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

namespace {

// ---- the driver, as cuda.h declares it ----------------------------------------------------------------------------------

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx*;
using CUmodule = struct CUmod*;
using CUfunction = struct CUfunc*;
using CUstream = struct CUstr*;

constexpr CUresult kSuccess = 0, kInvalidContext = 201;
constexpr int kMaxDynamicSharedSize = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kRelaxedCapture = 2;        // CU_STREAM_CAPTURE_MODE_RELAXED

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  CUstream stream;
  void* attributes;
  unsigned attribute_count;
};

struct Driver {
  CUresult (*cuInit)(unsigned);
  CUresult (*cuGetErrorName)(CUresult, const char**);
  CUresult (*cuGetErrorString)(CUresult, const char**);
  CUresult (*cuDeviceGet)(CUdevice*, int);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*cuCtxPushCurrent_v2)(CUcontext);
  CUresult (*cuCtxPopCurrent_v2)(CUcontext*);
  CUresult (*cuCtxSetCurrent)(CUcontext);
  CUresult (*cuModuleLoadData)(CUmodule*, const void*);
  CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char*);
  CUresult (*cuFuncSetAttribute)(CUfunction, int, int);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int*);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**);
};

Driver driver;

struct Failure {
  std::string text;
};
thread_local std::string last_error;

void check(CUresult status, const std::string& what) {
  if (status == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(status, &name);
  driver.cuGetErrorString(status, &text);
  throw Failure{what + ": " + (name ? name : "error " + std::to_string(status)) + (text ? std::string(" (") + text + ")" : "")};
}

template <typename Do>
int reported(Do&& act) {
  try {
    act();
    return 0;
  } catch (const Failure& failure) {
    last_error = failure.text;
    return 1;
  }
}

// ---- kernels ------------------------------------------------------------------------------------------------------------

// What a parameter is. A tensor map (a TMA descriptor, encoded here and cached by pointer and shape) would be one more kind.
enum class Kind : uint8_t { Pointer, Int32, Int64 };

struct Parameter {
  Kind kind;
  bool divisible;  // compiled for multiples of 16
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
  int scratch;
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
  if (kernel.shared > 48 * 1024)  // more than any kernel may use unasked
    check(driver.cuFuncSetAttribute(function, kMaxDynamicSharedSize, static_cast<int>(kernel.shared)), what);
  made.function.store(function, std::memory_order_release);
  return function;
}

// Numbers must be what the kernel was compiled for: it would compute with their low bits, or read at wrong addresses.
void check_arguments(const Kernel& kernel, void* const* pointers, const int64_t* integers) {
  size_t pointer = 0, integer = 0;
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const Parameter& parameter = kernel.parameters[i];
    const bool is_pointer = parameter.kind == Kind::Pointer;
    const int64_t value = is_pointer ? reinterpret_cast<int64_t>(pointers[pointer++]) : integers[integer++];
    const bool fits = parameter.kind != Kind::Int32 || value == static_cast<int32_t>(value);
    if (fits && !(parameter.divisible && value % 16 != 0)) continue;
    throw Failure{naming(kernel, "launching") + ": parameter " + std::to_string(i) + " is " + std::to_string(value) +
                  (fits ? ", which is not a multiple of 16" : ", which does not fit 32 bits")};
  }
}

void launch(Kernel& kernel, int device, CUstream stream, void** pointers, const int64_t* integers, const int64_t* grid,
            void** scratch) {
  if (grid[0] <= 0 || grid[1] <= 0 || grid[2] <= 0) return;
  check_arguments(kernel, pointers, integers);
  CUfunction function = load(kernel, device);
  // The address of a 64-bit integer is that of its low half as well: every platform of CUDA stores low bytes first.
  constexpr size_t kMany = 64;
  void* few[kMany];
  std::unique_ptr<void*[]> many;
  const size_t count = kernel.parameters.size() + static_cast<size_t>(kernel.scratch);
  if (count > kMany) many.reset(new void*[count]);
  void** arguments = many ? many.get() : few;
  void** next = arguments;
  for (const Parameter& parameter : kernel.parameters)
    *next++ = parameter.kind == Kind::Pointer ? static_cast<void*>(pointers++)
                                              : const_cast<void*>(static_cast<const void*>(integers++));
  for (int i = 0; i < kernel.scratch; ++i) *next++ = static_cast<void*>(scratch++);
  auto say = [&] {
    return naming(kernel, "launching") + " on a grid of " + std::to_string(grid[0]) + " x " + std::to_string(grid[1]) +
           " x " + std::to_string(grid[2]);
  };
  if (grid[0] > INT32_MAX || grid[1] > INT32_MAX || grid[2] > INT32_MAX) throw Failure{say() + ": that is too many"};
  CUlaunchConfig config{static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2]),
                        kernel.threads, 1, 1, kernel.shared, stream, nullptr, 0};
  CUresult status = driver.cuLaunchKernelEx(&config, function, arguments, nullptr);
  if (status == kInvalidContext) {  // a thread that has not used the GPU yet
    check(driver.cuCtxSetCurrent(kernel.loaded[device].context), say());
    status = driver.cuLaunchKernelEx(&config, function, arguments, nullptr);
  }
  if (status != kSuccess) check(status, say());
}

}  // namespace

// ---- what kgen/host/launch.py and the runtime call: a result other than 0 means that kgen_launch_error() says why ----------

extern "C" {

const char* kgen_launch_error() { return last_error.c_str(); }

int kgen_open_driver(const char* path) {
  return reported([&] {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw Failure{dlerror()};
    Driver found;
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw Failure{std::string(path) + " has no function " + name};
    };
#define KGEN_FIND(name) find(found.name, #name)
    KGEN_FIND(cuInit);
    KGEN_FIND(cuGetErrorName);
    KGEN_FIND(cuGetErrorString);
    KGEN_FIND(cuDeviceGet);
    KGEN_FIND(cuDevicePrimaryCtxRetain);
    KGEN_FIND(cuCtxPushCurrent_v2);
    KGEN_FIND(cuCtxPopCurrent_v2);
    KGEN_FIND(cuCtxSetCurrent);
    KGEN_FIND(cuModuleLoadData);
    KGEN_FIND(cuModuleGetFunction);
    KGEN_FIND(cuFuncSetAttribute);
    KGEN_FIND(cuThreadExchangeStreamCaptureMode);
    KGEN_FIND(cuLaunchKernelEx);
#undef KGEN_FIND
    driver = found;
    check(driver.cuInit(0), "starting the CUDA driver");
  });
}

// Lives as long as the process: a recorded CUDA graph may launch it after whoever made it is gone.
// `kinds` has one byte for each of the kernel's own parameters: Kind, plus 128 where it is compiled for multiples of 16.
void* kgen_create_kernel(const char* name, const char* function, const char* image, int64_t image_size, const uint8_t* kinds,
                         int kinds_size, int threads, int shared, int scratch) {
  auto made = std::make_unique<Kernel>();
  made->name = name;
  made->function = function;
  made->image.assign(image, static_cast<size_t>(image_size));
  made->threads = static_cast<unsigned>(threads);
  made->shared = static_cast<unsigned>(shared);
  made->scratch = scratch;
  for (int i = 0; i < kinds_size; ++i)
    made->parameters.push_back({static_cast<Kind>(kinds[i] & 127), (kinds[i] & 128) != 0});
  return made.release();
}

int kgen_load_kernel(void* kernel, int device) {
  return reported([&] { load(*static_cast<Kernel*>(kernel), device); });
}

int kgen_launch(void* kernel, int device, void* stream, void** pointers, const int64_t* integers, const int64_t* grid,
                void** scratch) {
  return reported([&] {
    launch(*static_cast<Kernel*>(kernel), device, static_cast<CUstream>(stream), pointers, integers, grid, scratch);
  });
}

}  // extern "C"
