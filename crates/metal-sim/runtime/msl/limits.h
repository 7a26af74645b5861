// Limits of numbers, names outside of the namespace, constants.
namespace metal {
template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
    static constexpr float infinity() { return __builtin_inff(); }
    static constexpr float max() { return 3.402823466e+38f; }
    static constexpr float lowest() { return -3.402823466e+38f; }
};
template <> struct numeric_limits<half> {
    static constexpr half infinity() { return (half)__builtin_inff(); }
    static constexpr half max() { return (half)65504.0f; }
    static constexpr half lowest() { return (half)-65504.0f; }
};
template <> struct numeric_limits<int> {
    static constexpr int max() { return 2147483647; }
    static constexpr int lowest() { return -2147483647 - 1; }
};
template <> struct numeric_limits<uint> {
    static constexpr uint max() { return 0xffffffffu; }
    static constexpr uint lowest() { return 0; }
};
} // namespace metal
using metal::as_type;
using metal::msl_mk;
typedef metal::packed_vec<float, 2> packed_float2;
typedef metal::packed_vec<float, 3> packed_float3;
typedef metal::packed_vec<float, 4> packed_float4;
typedef metal::packed_vec<half, 4> packed_half4;
namespace metal {
using ::float2;
using ::float3;
using ::float4;
using ::half;
using ::half2;
using ::half3;
using ::half4;
using ::int2;
using ::int3;
using ::int4;
using ::uchar2;
using ::uchar4;
using ::uint;
using ::uint2;
using ::uint3;
using ::uint4;
using ::ushort2;
} // namespace metal
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_E_F 2.71828182845904523536f
#define MAXFLOAT FLT_MAX
#define __METAL_VERSION__ 310
#define __METAL__ 1
#define METAL_SIM 1
