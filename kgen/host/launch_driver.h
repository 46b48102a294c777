// The CUDA driver, as cuda.h declares it, opened at run time: neither CUDA's headers nor a GPU is needed to build against this.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx*;
using CUmodule = struct CUmod*;
using CUfunction = struct CUfunc*;
using CUstream = struct CUstr*;

constexpr CUresult kSuccess = 0, kInvalidContext = 201;
constexpr int kMaxDynamicSharedSize = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kMaxThreadsPerBlock = 0;    // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
constexpr int kRelaxedCapture = 2;        // CU_STREAM_CAPTURE_MODE_RELAXED

constexpr int kSerializeByProgram = 6;      // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kEarlyInGraphs = 12030;       // the first version that records such launches in graphs

constexpr int kNoInterleave = 0, kPromoteTo128Bytes = 2, kFillZeros = 0;  // CU_TENSOR_MAP_...

struct alignas(64) CUtensorMap {  // a TMA descriptor
  uint64_t opaque[16];
};

struct CUlaunchAttribute {
  int id, padding;
  int64_t value[8];
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  CUresult (*cuInit)(unsigned);
  CUresult (*cuDriverGetVersion)(int*);
  CUresult (*cuGetErrorName)(CUresult, const char**);
  CUresult (*cuGetErrorString)(CUresult, const char**);
  CUresult (*cuDeviceGet)(CUdevice*, int);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*cuCtxPushCurrent_v2)(CUcontext);
  CUresult (*cuCtxPopCurrent_v2)(CUcontext*);
  CUresult (*cuCtxSetCurrent)(CUcontext);
  CUresult (*cuModuleLoadData)(CUmodule*, const void*);
  CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char*);
  CUresult (*cuFuncGetAttribute)(int*, int, CUfunction);
  CUresult (*cuFuncSetAttribute)(CUfunction, int, int);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int*);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                     const uint32_t*, int, int, int, int);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**);
  bool launches_early = false;
};

Driver driver;

struct Failure {
  std::string text;
  int code = 1;  // what the caller gets: 2 + k when descriptor k cannot be encoded
};

std::string described(CUresult status) {
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(status, &name);
  driver.cuGetErrorString(status, &text);
  return (name ? name : "error " + std::to_string(status)) + (text ? std::string(" (") + text + ")" : "");
}

void check(CUresult status, const std::string& what) {
  if (status != kSuccess) throw Failure{what + ": " + described(status)};
}

void open_driver(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Failure{dlerror()};
  Driver found;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) throw Failure{std::string(path) + " has no function " + name};
  };
#define KGEN_FIND(name) find(found.name, #name)
  KGEN_FIND(cuInit);
  KGEN_FIND(cuDriverGetVersion);
  KGEN_FIND(cuGetErrorName);
  KGEN_FIND(cuGetErrorString);
  KGEN_FIND(cuDeviceGet);
  KGEN_FIND(cuDevicePrimaryCtxRetain);
  KGEN_FIND(cuCtxPushCurrent_v2);
  KGEN_FIND(cuCtxPopCurrent_v2);
  KGEN_FIND(cuCtxSetCurrent);
  KGEN_FIND(cuModuleLoadData);
  KGEN_FIND(cuModuleGetFunction);
  KGEN_FIND(cuFuncGetAttribute);
  KGEN_FIND(cuFuncSetAttribute);
  KGEN_FIND(cuThreadExchangeStreamCaptureMode);
  KGEN_FIND(cuTensorMapEncodeTiled);
  KGEN_FIND(cuLaunchKernelEx);
#undef KGEN_FIND
  driver = found;
  check(driver.cuInit(0), "starting the CUDA driver");
  int version = 0;
  check(driver.cuDriverGetVersion(&version), "asking for the driver's version");
  driver.launches_early = version >= kEarlyInGraphs;
}

}  // namespace
