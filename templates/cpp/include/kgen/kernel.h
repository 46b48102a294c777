// Everything a generated kernel uses. See base.h for the design, vec.h for values, mask.h for masks, memory.h for loads and stores.
#pragma once

#include "base.h"
#include "vec.h"
#include "convert.h"
#include "mask.h"
#include "narrow.h"
#include "ops.h"
#include "math.h"
#include "memory.h"
#include "reduce.h"
#include "random.h"
#include "tile.h"
#include "loops.h"
