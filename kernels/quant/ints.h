// Integer names for device code: CUDA's run-time compiler has no <stdint.h>.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
#if defined(__METAL_VERSION__)
typedef unsigned long u64;
#else
typedef unsigned long long u64;
#endif
typedef signed char i8;
typedef short i16;
typedef int i32;
