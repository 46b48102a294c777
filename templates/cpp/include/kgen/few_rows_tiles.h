// Matmuls of up to 16 rows of bfloat16 with a large matrix, in AMX tiles: what few_rows.h does with registers.
#pragma once

#include "pack.h"

#if KGEN_AMX
namespace kgen {

// Columns of one step of dots_in_tiles.
inline constexpr int64_t kTileDots = 48;

// c[r * ldc + j] += dot products of all rows with up to 48 columns whose k are neighbours. The columns are the left operand of the
// instruction, so that their tiles are loaded as they lie; `x` has the rows as panels (pack_panels), one for each block of k.
inline void dots_in_tiles(const int32_t* x, Words<Bfloat16Pairs, bfloat16> b, int32_t* room, float* c, int64_t ldc, int64_t rows) {
  using U = Bfloat16Pairs;
  constexpr int64_t panel = kPanel<U>, depth = kDepth<U> * 2, prefetch = 512;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int64_t k = 0; k < b.nk; k += depth, x += panel * kDepth<U>) {
    const int64_t nk = smaller(depth, b.nk - k), words = words_of<Bfloat16Pairs>(nk);
    const auto* from = reinterpret_cast<const char*>(b.view.data + k);
    int64_t stride = b.view.i_stride * 2;
    if (b.ni < kTileDots || nk % 32 != 0) {
      pack_rows(Words<Bfloat16Pairs, bfloat16>{b.view.view(0, 0, k, 0, nullptr), b.ni, nk}, kTileDots, room, kDepth<U>);
      from = reinterpret_cast<const char*>(room);
      stride = kDepth<U> * 4;
    }
    for (int64_t w = 0; w < words; w += 16) {
      KGEN_UNROLL for (int64_t i = 0; i < kTileDots; ++i) __builtin_prefetch(from + i * stride + w * 4 + prefetch);
      _tile_loadd(6, x + w * panel, panel * 4);
      _tile_loadd(3, from + w * 4, stride);
      _tile_dpbf16ps(0, 3, 6);
      _tile_loadd(4, from + 16 * stride + w * 4, stride);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, from + 32 * stride + w * 4, stride);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  alignas(64) float sums[3][16][16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  using R = Register<float, 16>;
  for (int64_t t = 0; t * 16 < b.ni; ++t) {
    R block[16];
    KGEN_UNROLL for (int i = 0; i < 16; ++i) block[i] = register_at<R>(sums[t][i]);
    transpose_registers(block);
    for (int64_t r = 0; r < rows; ++r) {
      auto* const to = c + r * ldc + t * 16;
      const R sum = register_at<R>(to) + block[r];
      __builtin_memcpy(to, &sum, sizeof(sum));
    }
  }
}

}  // namespace kgen
#endif
