// A CUDA driver that runs "kernels" on the CPU: a module is any text, a kernel one of the functions below, called once per
// program of the grid. What the launcher asked for is recorded.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  int* attributes;
  unsigned attribute_count;
};

struct Kernel {
  void (*run)(const Config&, void** arguments);
};

int64_t driver_version = 12030, launches, loads, contexts_set, shared_limit, most_threads, fail_next, encodes, refuse_maps;
int64_t config_seen[10];  // grid, block along x, shared, stream, device of the context, attributes; the first and its value
int64_t arguments_seen[80];
int64_t encode_seen[32];  // the arguments of the last cuTensorMapEncodeTiled in order, arrays with as many numbers as counted
char types[100];          // of `record`: p pointer, i 32 bits, l 64 bits, m a descriptor (its address is recorded)
thread_local std::vector<intptr_t> contexts;

struct alignas(64) Map {  // sizes and the rest as the driver counts them: the innermost dimension first
  char* address;
  uint64_t bytes, rank, sizes[5], strides[5];  // of an element; of each dimension, in bytes
  uint32_t box[5];
};
static_assert(sizeof(Map) == 128);

const int kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};

template <typename T>
T& argument(void** arguments, int i) {
  return *static_cast<T*>(arguments[i]);
}

void record(const Config&, void** arguments) {
  for (int i = 0; types[i]; ++i)
    arguments_seen[i] = types[i] == 'i' ? argument<int32_t>(arguments, i) : argument<int64_t>(arguments, i);
}

// The element of a matrix in row i and column j, null outside.
char* element(const Map& map, uint64_t i, uint64_t j) {
  return i < map.sizes[1] && j < map.sizes[0] ? map.address + i * map.strides[1] + j * map.strides[0] : nullptr;
}

void copy_blocks(const Config& config, void** arguments) {  // x and out as descriptors of matrices: a block per program
  const Map &x = argument<Map>(arguments, 0), &out = argument<Map>(arguments, 5);
  if (argument<int32_t>(arguments, 1) != static_cast<int64_t>(x.sizes[1])) return;
  if (argument<int64_t>(arguments, 3) * x.bytes != x.strides[1]) return;
  const uint64_t rows = config.grid[0] * x.box[1], columns = config.grid[1] * x.box[0];
  for (uint64_t i = 0; i < rows; ++i)
    for (uint64_t j = 0; j < columns; ++j)
      if (char *from = element(x, i, j), *to = element(out, i, j); from && to) std::memcpy(to, from, x.bytes);
}

void add(const Config& config, void** arguments) {  // x, y, out, n: 256 elements per program
  auto *x = argument<float*>(arguments, 0), *y = argument<float*>(arguments, 1), *out = argument<float*>(arguments, 2);
  for (int64_t i = 0; i < std::min<int64_t>(argument<int64_t>(arguments, 3), config.grid[0] * 256); ++i) out[i] = x[i] + y[i];
}

void double_it(const Config&, void** arguments) {  // x in place, n, scratch of n floats
  auto *x = argument<float*>(arguments, 0), *scratch = argument<float*>(arguments, 2);
  const int32_t n = argument<int32_t>(arguments, 1);
  std::memcpy(scratch, x, static_cast<size_t>(n) * sizeof(float));
  for (int32_t i = 0; i < n; ++i) x[i] = 2 * scratch[i];
}

Kernel kernels[] = {{record}, {add}, {double_it}, {copy_blocks}};

}  // namespace

extern "C" {

int64_t* stub_numbers(const char* name) {
  const std::string wanted = name;
  if (wanted == "driver_version") return &driver_version;
  if (wanted == "launches") return &launches;
  if (wanted == "loads") return &loads;
  if (wanted == "contexts_set") return &contexts_set;
  if (wanted == "shared_limit") return &shared_limit;
  if (wanted == "most_threads") return &most_threads;
  if (wanted == "fail_next") return &fail_next;
  if (wanted == "encodes") return &encodes;
  if (wanted == "refuse_maps") return &refuse_maps;
  if (wanted == "encode") return encode_seen;
  return wanted == "config" ? config_seen : arguments_seen;
}
char* stub_types() { return types; }

// Three threads copy matrices of their own by `copy_blocks` at one launch site. How often a copy went elsewhere.
int64_t stub_race(int (*launch)(void*, int, void*, void**, const int64_t*, const int64_t*, void**), void* site, int rounds) {
  std::atomic<int64_t> wrong{0};
  auto work = [&](float mark) {
    alignas(64) float x[16], out[16];
    void* pointers[] = {x, out};
    const int64_t integers[] = {0, 4, 4, 4, 1, 0, 4, 4, 4, 1}, grid[] = {1, 1, 1};
    for (int round = 0; round < rounds; ++round, mark += 3) {
      std::fill_n(x, 16, mark);
      std::fill_n(out, 16, -1.0f);
      const int status = launch(site, 0, nullptr, pointers, integers, grid, nullptr);
      wrong += status != 0 || std::count(out, out + 16, mark) != 16;
    }
  };
  std::thread first(work, 0.0f), second(work, 1.0f);
  work(2.0f);
  first.join();
  second.join();
  return wrong;
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = static_cast<int>(driver_version), 0; }
int cuGetErrorName(int code, const char** text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 700 ? "an illegal memory access was encountered" : "something else";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 4 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = reinterpret_cast<void*>(intptr_t{100 + device}), 0; }
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(reinterpret_cast<intptr_t>(context)), 0; }
int cuCtxPopCurrent_v2(void**) { return contexts.pop_back(), 0; }
int cuCtxSetCurrent(void* context) {
  ++contexts_set;
  contexts.assign(1, reinterpret_cast<intptr_t>(context));
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  ++loads;
  *module = kernels;
  return contexts.empty() ? 201 : std::string(static_cast<const char*>(image)) == "damaged" ? 200 : 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  const std::string wanted = name;
  const std::string names[] = {"record", "add", "double_it", "copy_blocks"};
  const auto found = std::find(std::begin(names), std::end(names), wanted);
  *function = found == std::end(names) ? nullptr : &kernels[found - names];
  return *function ? 0 : 500;
}
int cuTensorMapEncodeTiled(Map* map, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  if (contexts.empty()) return 201;
  if (refuse_maps || reinterpret_cast<uintptr_t>(map) % 64 != 0) return 1;
  ++encodes;
  int64_t* next = encode_seen;
  auto see = [&](const auto* numbers, uint32_t count) { next = std::copy_n(numbers, count, next); };
  *next++ = type;
  *next++ = rank;
  *next++ = reinterpret_cast<intptr_t>(address);
  see(sizes, rank), see(strides, rank - 1), see(box, rank), see(steps, rank);
  for (int number : {interleave, swizzle, promotion, fill}) *next++ = number;
  *map = {static_cast<char*>(address), static_cast<uint64_t>(kElementBytes[type]), rank, {}, {}, {}};
  std::copy_n(sizes, rank, map->sizes);
  map->strides[0] = map->bytes;
  std::copy_n(strides, rank - 1, map->strides + 1);
  std::copy_n(box, rank, map->box);
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = static_cast<int>(most_threads);
  return attribute == 0 ? 0 : 1;
}
int cuFuncSetAttribute(void*, int attribute, int value) { return shared_limit = value, attribute == 8 ? 0 : 1; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuLaunchKernelEx(const Config* config, void* kernel, void** arguments, void**) {
  if (contexts.empty()) return 201;
  if (fail_next) return static_cast<int>(fail_next);
  ++launches;
  const int64_t seen[] = {config->grid[0], config->grid[1], config->grid[2], config->block[0], config->shared,
                          reinterpret_cast<intptr_t>(config->stream), contexts.back(), config->attribute_count,
                          config->attribute_count ? config->attributes[0] : 0, config->attribute_count ? config->attributes[2] : 0};
  std::memcpy(config_seen, seen, sizeof seen);
  static_cast<Kernel*>(kernel)->run(*config, arguments);
  return 0;
}

}  // extern "C"
