// Everything a generated kernel uses: base.h has the design, vec.h the values, mask.h masks, memory.h loads and stores.
#pragma once

#include "base.h"
#include "vec.h"
#include "convert.h"
#include "mask.h"
#include "narrow.h"
#include "ops.h"
#include "math.h"
#include "memory.h"
#include "strided.h"
#include "reduce.h"
#include "random.h"
#include "tile.h"
#include "loops.h"
#include "scan.h"
#include "matmul.h"
#include "attention_backward.h"
