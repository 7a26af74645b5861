#!/usr/bin/env python3
"""Counts kernels of llama.cpp (ggml) and MLX in the project's simulator, on shapes of kernels/metal/README.md.

    tools/metal_others.py GGML MLX [METAL_SIM]

GGML and MLX are checkouts of github.com/ggml-org/ggml and github.com/ml-explore/mlx; METAL_SIM is the simulator's
program, target/debug/metal-sim by default. Functions are cut out of the checkouts, given a kernel of the plain form
that the simulator reads, and counted: nothing of them is kept. Prints rows of work, engine, loads, bytes,
multiplications and instructions of threads for each multiply-add (of a norm, each number), functions of simdgroups,
multiplications of matrices, threadgroup memory and barriers, as `metal-sim costs` prints its second table.
"""
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

N, K = 64, 512
# Types of ggml of about two to four bits, in blocks of 256.
SMALL = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_XS", "TQ2_0"]
HEADS, GROUP, D, KEYS = 8, 4, 128, 257
V_HEADS = 4


def function(text, name):
    """A function with its template line, by the matching of braces."""
    found = re.search(rf"^[^\n;={{}}#]*\b{re.escape(name)}\s*\(", text, re.M)
    if not found:
        raise SystemExit(f"no function {name}: the checkout is another version")
    begin = found.start()
    lines = text[:begin].splitlines(keepends=True)
    while lines and lines[-1].strip() and not re.search(r"[;}]\s*$|^\s*#", lines[-1]):
        begin -= len(lines.pop())
    depth, at = 0, text.index("{", found.end())
    for end in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin : end + 1] + "\n"
    raise SystemExit(f"{name} has no end")


def without_comments(text):
    """Comments may hold braces."""
    return re.sub(r"//[^\n]*", "", text)


def plain(source):
    """Takes what compiles and is no kernel's own: attributes and functions' marks."""
    source = re.sub(r"\[\[(host_name|max_total|function_constant)[^\]]*\]\]", "", source)
    return source.replace("METAL_FUNC", "inline")


def inner(source):
    """A kernel as a function that another calls."""
    return source.replace("kernel void", "inline void").replace("[[", "/*[[").replace("]]", "]]*/")


GGML_HEAD = """
#define FOR_UNROLL(x) _Pragma("clang loop unroll(full)") for (x)
#define N_SIMDWIDTH 32
#define QK4_0 32
#define QK5_0 32
#define QK5_1 32
#define QK8_0 32
#define QK_K 256
#define FC_mul_mv_nsg NSG_
#define FC_mul_mv_ne12 1
#define FC_mul_mv_r2 1
#define FC_mul_mv_r3 1
#define FC_gated_delta_net_ne20 128
#define FC_gated_delta_net_ne30 1
#define FC_gated_delta_net_K 1
#define QK_MXFP4 32
struct block_q4_0 { half d; uchar qs[16]; };
struct block_q4_1 { half d; half m; uchar qs[16]; };
struct block_q5_0 { half d; uchar qh[4]; uchar qs[16]; };
struct block_q5_1 { half d; half m; uchar qh[4]; uchar qs[16]; };
struct block_q8_0 { half d; int8_t qs[32]; };
struct block_mxfp4 { uchar e; uchar qs[16]; };
struct block_q2_K { uchar scales[16]; uchar qs[64]; half d; half dmin; };
struct block_q3_K { uchar hmask[32]; uchar qs[64]; uchar scales[12]; half d; };
struct block_q4_K { half d; half dmin; uchar scales[12]; uchar qs[128]; };
struct block_q5_K { half d; half dmin; uchar scales[12]; uchar qh[32]; uchar qs[128]; };
struct block_q6_K { uchar ql[128]; uchar qh[64]; int8_t scales[16]; half d; };
struct Product { int ne00, ne01, ne0, ne1; ulong nb01, nb02, nb03, nb11, nb12, nb13, nb00; };
inline float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
"""

# What tiles want besides: matrices as arrays of vectors.
GGML_TILES = """
struct float4x4 { float4 c[4]; float4& operator[](int i) { return c[i]; } };
struct half4x4 {
    half4 c[4];
    half4x4() = default;
    explicit half4x4(float4x4 f) { for (int i = 0; i < 4; i++) c[i] = half4(f.c[i].x, f.c[i].y, f.c[i].z, f.c[i].w); }
    half4& operator[](int i) { return c[i]; }
};
struct bfloat4x4 {
    bfloat4 c[4];
    bfloat4& operator[](int i) { return c[i]; }
};
struct packed_char4 { char2 a, b; };
#define FC_mul_mm_bc_inp false
#define FC_mul_mm_bc_out false
#define FC_mul_mm_ne12 1
#define FC_mul_mm_r2 1
#define FC_mul_mm_r3 1
"""

GGML_TILE = """
kernel void counted(constant ggml_metal_kargs_NAME& args [[buffer(0)]], device const char* a [[buffer(1)]],
                    device const char* b [[buffer(2)]], device char* c [[buffer(3)]], LISTS
                    uint3 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 shared[512];
    kernel_NAME<half, half4x4, simdgroup_half8x8, half, half4x4, simdgroup_half8x8, BLOCK, NL, dequantize_TYPE, float,
                float4x4, float, float4x4>(ARGS);
}
"""

GGML_PRODUCT = """
kernel void counted(constant Product& args [[buffer(0)]], device const char* a [[buffer(1)]],
                    device const char* b [[buffer(2)]], device char* c [[buffer(3)]],
                    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                    uint sg [[simdgroup_index_in_threadgroup]]) {
    SHARED
    CALL(args, a, b, c, shared, group, lane, sg);
}
"""


def ggml_product(text, block, row_bytes, names, call, nsg, rows, size=2):
    """A product of one row: its source, parameters and grid."""
    source = GGML_HEAD.replace("NSG_", str(nsg)) + "".join(function(text, name) for name in names)
    # The most that a kernel takes: a table of 512 numbers of eight bytes, and signs.
    words = 528 if "_iq" in block else 128 if "helper_mv_reduce_and_write" in names or "mxfp4" in block else 0
    shared = "threadgroup char* shared = nullptr;"
    if words > 0:
        shared = f"threadgroup ulong words[{words}]; threadgroup char* shared = (threadgroup char*)words;"
    source += GGML_PRODUCT.replace("CALL", call).replace("SHARED", shared)
    strides = [row_bytes, N * row_bytes, N * row_bytes, 4 * K, 4 * K, 4 * K]
    params = struct.pack("<4i7Q", K, N, N, 1, *strides, size)
    slots = [(0, "p", params), (1, "z", N * row_bytes), (2, "z", 4 * K), (3, "w", 4 * N)]
    per_group = rows if "t_t" in call or "q8_0" in call else nsg * rows
    return source, slots, (N // per_group, 1, 1), 32 * nsg, N * K


def overload(text, block):
    """Of the functions of one name, that for a block."""
    for part in re.split(r"(?=^inline float block_q_n_dot_y\()", text, flags=re.M)[1:]:
        if part.startswith(f"inline float block_q_n_dot_y(device const {block} "):
            return function(part, "block_q_n_dot_y")
    raise SystemExit(f"no product of {block}")


def kargs(impl, name):
    """A struct of parameters."""
    fields = re.search(rf"typedef struct \{{([^}}]*)\}} ggml_metal_kargs_{name};", impl).group(1)
    for theirs, ours in [("uint64_t", "ulong"), ("int32_t", "int"), ("int16_t", "short")]:
        fields = fields.replace(theirs, ours)
    fields = re.sub(r"//[^\n]*", "", fields)
    return f"struct ggml_metal_kargs_{name} {{ {fields} }};\n"


# Bytes of a block, of 32 weights or of 256.
BLOCKS = dict(Q4_0=18, Q4_1=20, Q5_0=22, Q5_1=24, Q8_0=34, MXFP4=17, IQ4_NL=18, Q2_K=84, Q3_K=110, Q4_K=144, Q5_K=176,
              Q6_K=210, IQ2_XXS=66, IQ2_XS=74, IQ2_S=82, IQ3_XXS=98, IQ3_S=110, IQ1_S=50, IQ1_M=56, IQ4_XS=136)
BLOCKS |= dict(TQ2_0=66)
BLOCKS_256 = [name for name in BLOCKS if name.endswith("_K") or name in SMALL]


def ggml_name(name):
    """A type as ggml's functions call it."""
    return name[0].lower() + name[1:] if name.endswith("_K") else name.lower()


def four_bit_table(text, name):
    """Numbers of four bits: `mxfp4` or `iq4nl`."""
    return re.search(rf"constant static float kvalues_{name}_f\[16\] = \{{.*?\}};", text, re.S).group(0) + "\n"


def small_blocks(common, name):
    """The struct of a type of two to four bits with the tables that it looks numbers up in."""
    if name not in [*SMALL, "IQ4_NL"]:
        return ""
    tables = dict(IQ2_XXS=["iq2xxs_grid"], IQ2_XS=["iq2xs_grid"], IQ2_S=["iq2s_grid"], IQ3_XXS=["iq3xxs_grid"])
    tables |= dict(IQ3_S=["iq3s_grid"], IQ1_S=["iq1s_grid_gpu"], IQ1_M=["iq1s_grid_gpu"])
    source = "typedef half ggml_half;\n#define NGRID_IQ1S 2048\n#define IQ1S_DELTA 0.125f\n#define IQ1M_DELTA 0.125f\n"
    source += "#define QK4_NL 32\n#define IQ3S_N_SCALE QK_K/64\n"
    for table in ["kmask_iq2xs", "ksigns_iq2xs"] + tables.get(name, []):
        found = re.search(rf"GGML_TABLE_BEGIN\((\w+), {table}, (\w+)\)(.*?)GGML_TABLE_END\(\)", common, re.S)
        source += f"constant static {found.group(1)} {table}[{found.group(2)}] = {{ {found.group(3)} }};\n"
    low = ggml_name(name)
    found = re.search(rf"typedef struct \{{([^}}]*)\}} block_{low};", common)
    source += f"struct block_{low} {{ {found.group(1)} }};\n"
    if name == "IQ1_M":
        source += "typedef union { half f16; uint16_t u16; } iq1m_scale_t;\n"
    return source


def ggml_tiles(text, impl, common):
    """Products of many rows of x: 32 of them, and 32 pairs of each of two experts."""
    # Of two versions the second is for GPUs without tensors.
    tiled = text[text.index("constant short FC_mul_mm_r3") :]
    tiled = tiled[tiled.index("#else") :]
    store = "*(threadgroup S1_2x4 *)(sb + 64*ib + 8*ly) = (S1_2x4)(*((device T1_2x4 *) y));"
    stores = "".join(
        f"{{ const float4 v = ((device const float4*) y)[{i}];"
        f" *(threadgroup half4*)(sb + 64*ib + 8*ly + {4 * i}) = half4(v.x, v.y, v.z, v.w); }}"
        for i in range(2)
    )
    table = four_bit_table(text, "mxfp4") + four_bit_table(text, "iq4nl")
    helpers = {"Q3_K": [], "Q4_K": ["get_scale_min_k4_just2"], "Q5_K": ["get_scale_min_k4_just2"]}
    helpers["MXFP4"] = ["e8m0_to_fp32"]
    blocks = [(name, size, 256 if name in BLOCKS_256 else 32) for name, size in BLOCKS.items()]
    for name, size, of_block in [("F16", 2, 1), ("BF16", 2, 1), *blocks]:
        low, nl, row = ggml_name(name), max(of_block // 16, 1), K * size // of_block
        functions = helpers.get(name, []) + [f"dequantize_{low}"]
        head = GGML_HEAD + GGML_TILES + table + small_blocks(common, name)
        head += "".join(function(text, f) for f in functions)
        head = head.replace("uchar2{uchar(", "uchar2{(uchar)(").replace(", uchar(q", ", (uchar)(q")
        # Vectors that are copied from memory one by one, and bytes that lie at any address.
        head = head.replace("reg = (type4x4)(*src);", "for (int i = 0; i < 4; i++) reg[i] = src->c[i];")
        head = head.replace("(type4x4) reg_f", "type4x4(reg_f)")
        head = head.replace("float4(qs[4*il + i])", "float4(qs[4*il + i].a.x, qs[4*il + i].a.y, qs[4*il + i].b.x, "
                            "qs[4*il + i].b.y)")
        for kernel, what in [("mul_mm", "32 rows of x"), ("mul_mm_id", "32 pairs of an expert")]:
            is_id = kernel == "mul_mm_id"
            body = inner(function(tiled, f"kernel_{kernel}"))
            body = re.sub(r"#ifdef GGML_METAL_HAS_TENSOR\n.*?#(else|endif)\n", "", body, flags=re.S)
            body = re.sub(r"#ifndef GGML_METAL_HAS_TENSOR\n(.*?)#else\n.*?#endif\n", r"\1", body, flags=re.S)
            body = re.sub(r"^#endif.*$", "", body, flags=re.M).replace(store, stores)
            lists = "device const char* n [[buffer(4)]], device const char* ids [[buffer(5)]],"
            args = "args, a, b, n, ids, c, (threadgroup char*)shared, group, t, lane, sg"
            if not is_id:
                lists, args = "", "args, a, b, c, (threadgroup char*)shared, group, t, sg"
            block = dict(F16="half4x4", BF16="bfloat4x4").get(name, f"block_{low}")
            call = GGML_TILE.replace("NAME", kernel).replace("BLOCK", block).replace("NL,", f"{nl},")
            if name == "BF16":
                call, body = call.replace("half", "bfloat"), body.replace("half4", "bfloat4")
                rounded = ", ".join(f"(bfloat)v.{axis}" for axis in "xyzw")
                body = body.replace("bfloat4(v.x, v.y, v.z, v.w)", f"bfloat4{{{rounded}}}")
            call = call.replace("TYPE", low).replace("ARGS", args).replace("LISTS", lists)
            source = head + kargs(impl, kernel) + body + call
            if is_id:
                # Two experts, each of which has every token in one of its two slots.
                params = struct.pack("<2i3Qi4x4Q4i2h4x", K, 2, row, N * row, 2 * N * row, 1, 4, 4 * K, 4 * K,
                                     128 * K, 2, 32, N, 2, 1, 1)
                ids = b"".join(struct.pack("<i", 2 * t + e) for e in range(2) for t in range(32))
                counts = struct.pack("<2i", 32, 32)
                slots = [(0, "p", params), (1, "z", 2 * N * row), (2, "z", 128 * K), (3, "w", 2 * 128 * N)]
                slots += [(4, "r", counts), (5, "r", ids)]
                yield f"{what}, {name}", "ggml", (source, slots, (1, N // 64, 2), 128, 2 * N * K * 32)
            else:
                params = struct.pack("<2i3Qi4x4Q2i2h4x", K, 1, row, N * row, N * row, 1, 4, 4 * K, 128 * K, 128 * K,
                                     N, 32, 1, 1)
                slots = [(0, "p", params), (1, "z", N * row), (2, "z", 128 * K), (3, "w", 128 * N)]
                yield f"{what}, {name}", "ggml", (source, slots, (1, N // 64, 1), 128, N * K * 32)


def ggml_prompt(text, impl):
    """Attention of a prompt: 64 tokens, of which the last one sees 256 keys; the mask is of zeros, and said to hold
    something in the last 64 keys alone."""
    body = inner(function(text, "kernel_flash_attn_ext_impl"))
    # Of branches for quantised caches, which are not taken; the simulator has no such assignment.
    body = body.replace("sk4x4[4*ty + tx] = tmp;", "").replace("sv4x4[4*ty + tx] = tmp;", "")
    keys, tokens, n_kv = KEYS // 32 * 32, 64, HEADS // GROUP
    body = body.replace("(q4_t) q4[i]", "half4(q4[i].x, q4[i].y, q4[i].z, q4[i].w)")
    body = body.replace("s2_t(sm2[j*SH + tiisg])", "float2(sm2[j*SH + tiisg].x, sm2[j*SH + tiisg].y)")
    body = body.replace("(float4) so4", "so4").replace("[ 0 ... NQ-1 ] = 0.0f", "")
    body = re.sub(r"\{ \[0 \.\.\. NQ-1\] = ([^}]*) \}", r"{ \1, \1 }", body)
    body = body.replace("#pragma unroll (MIN(DK8/2, 4*NSG))", "_Pragma(\"unroll 8\")")
    off = "".join(f"#define FC_flash_attn_ext_{name} false\n" for name in
                  ["has_sinks", "has_bias", "has_scap", "has_kvpad", "bc_mask"])
    source = GGML_HEAD + GGML_TILES + off + f"""
#define FC_flash_attn_ext_has_mask true
#define FC_flash_attn_ext_ns10 {D}
#define FC_flash_attn_ext_ns20 {D}
#define PAD2(x, n) (((x) + (n) - 1) & ~((n) - 1))
#define MAXHALF 65504.0h
""" + kargs(impl, "flash_attn_ext") + """
inline void half4x4_of(device const half4x4*, short, thread half4x4&) {}
""" + body + """
kernel void counted(constant ggml_metal_kargs_flash_attn_ext& args [[buffer(0)]],
                    device const char* q [[buffer(1)]], device const char* k [[buffer(2)]],
                    device const char* v [[buffer(3)]], device const char* mask [[buffer(4)]],
                    device const char* blk [[buffer(5)]], device char* to [[buffer(6)]],
                    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 shared[640];
    kernel_flash_attn_ext_impl<half, half4, simdgroup_half8x8, half, half4x4, simdgroup_half8x8, half, half4x4,
                               simdgroup_half8x8, float, simdgroup_float8x8, float, float2, simdgroup_float8x8, float,
                               float4, simdgroup_float8x8, half4x4, 1, half4x4_of, half4x4, 1, half4x4_of, 128, 128, 8,
                               64, 4>(args, q, k, v, mask, q, q, blk, to, (threadgroup half*)shared, group, lane, sg);
}
"""
    row = 2 * D
    values = [tokens, HEADS, 1, 4 * D * HEADS, 4 * D, 4 * D * HEADS * tokens, keys, n_kv, 1, D, row, row * keys,
              row * keys * n_kv, D, row, row * keys, row * keys * n_kv, tokens, 1, 1, 2 * keys, 2 * keys * tokens,
              2 * keys * tokens, HEADS, tokens, 1, 1.0, 0.0, 0.0, 0.0, 1, 0.0]
    params = struct.pack("<3i4x3Q4i3Qi4x3Q3i4x3Q3i4fif4x", *values)
    slots = [(0, "p", params), (1, "z", tokens * HEADS * D * 4), (2, "z", n_kv * row * keys)]
    slots += [(3, "z", n_kv * row * keys), (4, "z", 2 * keys * tokens)]
    slots.append((5, "r", bytes([2, 2, 2, 1] * (tokens // 8))))
    slots.append((6, "w", tokens * HEADS * D * 4))
    seen = sum(range(keys - tokens + 1, keys + 1))
    return "attention, prompt", "ggml", (source, slots, (tokens // 8, HEADS, 1), 128, 2 * HEADS * D * seen)


def ggml(root):
    """Every row of ggml's: what it is beside, and a source to be counted."""
    text = without_comments((root / "src/ggml-metal/ggml-metal.metal").read_text())
    impl = (root / "src/ggml-metal/ggml-metal-impl.h").read_text()
    rows = lambda name: int(re.search(rf"#define N_R0_{name}\s+(\d+)", impl).group(1))
    groups = lambda name: int(re.search(rf"#define N_SG_{name}\s+(\d+)", impl).group(1))
    common = without_comments((root / "src/ggml-common.h").read_text())
    for name, size in BLOCKS.items():
        low, n, of_block = ggml_name(name), rows(name), 256 if name in BLOCKS_256 else 32
        block, kernel, names = f"block_{low}", f"kernel_mul_mv_{low}_f32_impl", []
        if name == "MXFP4":
            names = ["e8m0_to_fp32"]
        elif name == "Q8_0":
            names = ["helper_mv_reduce_and_write"]
        elif of_block == 32 and name != "IQ4_NL":
            kernel = "mul_vec_q_n_f32_impl"
        args = f"{block}, {n}" if kernel.startswith("mul_vec") else f"{n}"
        call = f"{kernel}<{args}, constant Product&>"
        work = ggml_product(text, block, K // of_block * size, names + [kernel], call, groups(name), n, size)
        before = ""
        if kernel.startswith("mul_vec"):
            before = overload(text, block)
        elif name == "MXFP4":
            before = four_bit_table(text, "mxfp4")
        elif name in [*SMALL, "IQ4_NL"]:
            before = four_bit_table(text, "iq4nl") + small_blocks(common, name)
        # The simulator wants one writer of a number.
        source = work[0].replace("shmem_f32[tiisg] =", "if (sgitg == 0) shmem_f32[tiisg] =")
        yield f"one row of x, {name}", "ggml", (source.replace("template<", before + "template<", 1), *work[1:])
    names = ["helper_mv_reduce_and_write", "kernel_mul_mv_t_t_impl"]
    call = "kernel_mul_mv_t_t_impl<bfloat, float, 2, constant Product&>"
    yield "one row of x, BF16", "ggml", ggml_product(text, "bfloat", 2 * K, names, call, 4, 2)

    yield from ggml_tiles(text, impl, common)

    # The first of two versions is the one that is compiled.
    body = inner(function(text, "kernel_gated_delta_net_impl"))
    fields = "int ne01, ne11, ne21, ne22, ne23, ns02, ns12, ns22; ulong nb01, nb03, nb11, nb13, nb21, nb23;"
    source = GGML_HEAD + f"struct ggml_metal_kargs_gated_delta_net {{ {fields} }};\n" + body
    source += """
kernel void counted(constant ggml_metal_kargs_gated_delta_net& args [[buffer(0)]], device const char* q [[buffer(1)]],
                    device const char* k [[buffer(2)]], device const char* v [[buffer(3)]],
                    device const char* g [[buffer(4)]], device const char* b [[buffer(5)]],
                    device const char* s [[buffer(6)]], device char* to [[buffer(7)]],
                    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                    uint sg [[simdgroup_index_in_threadgroup]]) {
    kernel_gated_delta_net_impl<4>(args, q, k, v, g, b, s, to, group, uint3(lane, sg, 0), uint3(32, 4, 1));
}
"""
    for tokens in [1, 64]:
        row = 4 * D
        numbers = [V_HEADS, V_HEADS, V_HEADS, tokens, 1, V_HEADS * D, V_HEADS * D, V_HEADS * D]
        strides = [row, tokens * V_HEADS * row] * 3
        params = struct.pack("<8i6Q", *numbers, *strides)
        each, states = tokens * V_HEADS * row, V_HEADS * D * D * 4
        sizes = [("z", each)] * 3 + [("z", tokens * V_HEADS * 4)] * 2 + [("z", states), ("w", each + states)]
        slots = [(0, "p", params)] + [(i + 1, kind, size) for i, (kind, size) in enumerate(sizes)]
        what = "delta_net, token" if tokens == 1 else "delta_net, prompt"
        yield what, "ggml", (source, slots, (D // 4, V_HEADS, 1), 128, 3 * tokens * V_HEADS * D * D)

    # Without a mask, behind keys that fill its blocks of 32; two simdgroups a head and no second pass.
    body = inner(function(text, "kernel_flash_attn_ext_vec"))
    # Casts of vectors, which the simulator's compiler does not take, with the types that they have here.
    for cast in ["(q4_t) q4[i]", "(q4_t) 0.0f", "(o4_t) 0.0f", "(s4_t) 0.0f", "(float4) mk", "(float4) sq4[i]"]:
        to, what = cast[1:].split(") ")
        body = body.replace(cast, f"{dict(q4_t='half4').get(to, 'float4')}({what})")
    body = re.sub(r"\(float4\) (p[kq]4\[[^\]]*\])", r"float4(\1)", body).replace("o4_t(float4", "(float4")
    body = body.replace("[ 0 ... C/NE - 1] = 0.0f", "")
    # The simulator wants one writer of a number, and a fence where lanes go on in step by themselves.
    body = body.replace("if (iq1 < args.ne01) {", "if (iq1 < args.ne01 && sgitg == 0) {", 1)
    body = body.replace("i < SH/4; i += NW", "i < SH/8; i += NW")
    fence = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    for at in ["int ic = ic0*C;", "const float M1 = ss[r*(SH/2) + 1];"]:
        body = body.replace(at, f"{at} {fence}")
    struct_of = re.search(r"typedef struct \{([^}]*)\} ggml_metal_kargs_flash_attn_ext_vec;", impl).group(1)
    fields = re.sub(r"//[^\n]*", "", struct_of).replace("uint64_t", "ulong").replace("int32_t", "int")
    no = "mask sinks bias scap kvpad".split()
    flags = "".join(f"#define FC_flash_attn_ext_vec_has_{name} false\n" for name in no)
    numbers = "".join(
        f"#define FC_flash_attn_ext_vec_{name} {n}\n" for name, n in dict(ns10=D, ns20=D, nsg=2, nwg=1).items()
    )
    source = GGML_HEAD + flags + numbers + """
#define PAD2(x, n) (((x) + (n) - 1) & ~((n) - 1))
#define MAXHALF 65504.0h
#define OP_FLASH_ATTN_EXT_VEC_NQPSG 1
#define OP_FLASH_ATTN_EXT_VEC_NCPSG 32
""" + f"struct ggml_metal_kargs_flash_attn_ext_vec {{ {fields} }};\n" + """
inline void half4_of(device const half4* x, short, thread half4& y) { y = *x; }
""" + body + """
kernel void counted(constant ggml_metal_kargs_flash_attn_ext_vec& args [[buffer(0)]],
                    device const char* q [[buffer(1)]], device const char* k [[buffer(2)]],
                    device const char* v [[buffer(3)]], device char* to [[buffer(4)]],
                    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup half shared[2 * (128 + 128 + 2 * 128)];
    kernel_flash_attn_ext_vec<half4, half4, half4, float, float, float4, float4, half4, 1, half4_of, half4, 1, half4_of,
                              128, 128, 1>(args, q, k, v, q, q, q, to, shared, group, lane, sg);
}
"""
    n_kv, keys = HEADS // GROUP, KEYS // 32 * 32
    row, rows_of = 2 * D, 2 * D * keys
    values = [1, HEADS, 1, 4 * D, 4 * D, 4 * D * HEADS, keys, n_kv, 1, D, row, rows_of, rows_of * n_kv, D, row, rows_of]
    values += [rows_of * n_kv, 1, 1, 1, 0, 0, 0, HEADS, 1, 1, 1.0, 0.0, 0.0, 0.0, 1, 0.0]
    params = struct.pack("<3i4x3Q4i3Qi4x3Q3i4x3Q3i4fif4x", *values)
    slots = [(0, "p", params), (1, "z", HEADS * D * 4), (2, "z", n_kv * rows_of), (3, "z", n_kv * rows_of)]
    slots.append((4, "w", HEADS * D * 4))
    yield "attention, token", "ggml", (source, slots, (1, HEADS, 1), 64, HEADS * 2 * D * keys)

    yield ggml_prompt(text, impl)

    body = inner(function(text, "kernel_rms_norm_fuse_impl"))
    fields = "int ne00, ne00_t; ulong nb1, nb2, nb3; float eps; int nef1[3], nef2[3], nef3[3];"
    fields += " ulong nbf1[3], nbf2[3], nbf3[3];"
    source = GGML_HEAD + f"struct ggml_metal_kargs_norm {{ {fields} }};\n" + body
    source += """
kernel void counted(constant ggml_metal_kargs_norm& args [[buffer(0)]], device const char* x [[buffer(1)]],
                    device const char* w [[buffer(2)]], device char* to [[buffer(3)]],
                    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float shared[32];
    kernel_rms_norm_fuse_impl<float4, 2>(args, x, w, w, to, shared, group, ushort3(32 * sg + lane, 0, 0), sg, lane,
                                         ushort3(256, 1, 1));
}
"""
    # One row of 1024 numbers; a quarter as many threads as numbers of four.
    params = struct.pack("<2i3Qf9i9Q", 1024, 256, 4096, 4096, 4096, 1e-5, *([1] * 9), *([4096] * 9))
    slots = [(0, "p", params), (1, "z", 4096), (2, "z", 4096), (3, "w", 4096)]
    yield "rms_norm, token", "ggml", (source, slots, (1, 1, 1), 256, 1024)


MLX_HEAD = """
#define SIMD_SIZE 32
template <class T> struct Limits;
template <> struct Limits<float> { static constexpr float finite_min = -3.402823466e+38f; };
template <> struct Limits<half> { static constexpr half finite_min = -65504.0h; };
"""

# What MLX's classes of tiles name from other files: whole numbers as types, and what a pointer points to.
STEEL_HEAD = """
#define METAL_FUNC inline
#define STEEL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
template <int v> struct Int { constexpr operator int() const { return v; } };
template <class P> using pointer_element_t = unqual_t<P>;
"""


def declared(text, name, nth=0):
    """The nth struct of a name, with its template line."""
    found = [m for m in re.finditer(rf"^struct {re.escape(name)}\b[^;]*?\{{", text, re.M)][nth]
    begin = text.rindex("template", 0, found.start())
    depth = 0
    for end in range(found.end() - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin : end + 1] + ";\n"
    raise SystemExit(f"struct {name} has no end")


def steel(source):
    """Classes of tiles as the simulator takes them: constants are of no address space, attributes stand at kernels."""
    source = re.sub(r"\[\[[^\]]*\]\]", "", source).replace("[[kernel]] void", "inline void")
    for constant in ["STEEL_CONST", "MLX_MTL_CONST"]:
        source = source.replace(constant, "static constexpr")
    # As many bytes as a thread copies at once, which the simulator's compiler does not copy as a struct between
    # address spaces.
    copied = r"struct alignas\(alignment \* sizeof\(T\)\) ReadVector \{.*?\};"
    source = re.sub(copied, "typedef vec<uint, sizeof(T) * vec_size / 4> ReadVector;", source, flags=re.S)
    # A tile that begins as zeros, all of them.
    return source.replace("val_frags[kNumFrags] = {frag_type(0)};", "val_frags[kNumFrags] = {};")


def steel_classes(folder, kind):
    """Matrices, tiles and loaders of products (`gemm`) or of attention (`attn`)."""
    mma, loader, transforms = (without_comments((folder / f"steel/{kind}/{name}.h").read_text())
                               for name in ("mma", "loader", "transforms"))
    parts = [declared(transforms, "TransformNone")]
    parts += [declared(mma, "BaseMMAFrag", n) for n in range(2)] + [declared(mma, "MMATile")]
    parts += [function(mma, "tile_matmad"), declared(mma, "BlockMMA")]
    parts.append(declared(loader, "BlockLoader" if kind == "gemm" else "BlockLoaderT"))
    return MLX_HEAD + STEEL_HEAD + steel("".join(parts))


def mlx_tiles(folder):
    """Products in tiles: of codes of four bits with 32 rows of x and with 32 pairs of each of two experts, and of
    numbers of 16 bits."""
    text = without_comments((folder / "quantized.h").read_text())
    classes = steel_classes(folder, "gemm")
    names = ["get_pack_factor", "get_bytes_per_pack", "dequantize"]
    codes = "".join(plain(function(text, name)) for name in names) + declared(text, "QuantizedBlockLoader")
    head = classes + steel(codes)
    product = steel(plain(function(text, "qmm_t_impl"))).replace("mlx::steel::", "")
    source = head + product + """
kernel void counted(device const uint* w [[buffer(0)]], device const half* scales [[buffer(1)]],
                    device const half* biases [[buffer(2)]], device const half* x [[buffer(3)]],
                    device half* y [[buffer(4)]], constant int& k [[buffer(5)]], constant int& n [[buffer(6)]],
                    constant int& m [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
                    uint t [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float4 xs[32 * 40 / 8], ws[32 * 40 / 8];
    qmm_t_impl<half, 64, 4, true, 32, 32, 32>(w, scales, biases, x, y, (threadgroup half*)xs, (threadgroup half*)ws, k,
                                              n, m, k, group, t, sg, lane);
}
"""
    number = lambda n: struct.pack("<i", n)
    slots = [(0, "z", N * K // 2), (1, "z", N * K // 32), (2, "z", N * K // 32), (3, "z", 64 * K), (4, "w", 64 * N)]
    slots += [(5, "p", number(K)), (6, "p", number(N)), (7, "p", number(32))]
    yield "32 rows of x, MLX 4 bits", "MLX", (source, slots, (N // 32, 1, 1), 128, 32 * N * K)

    utils = without_comments((folder / "quantized_utils.h").read_text())
    loops = ["gemm_loop_aligned", "gemm_loop_unaligned", "gemm_loop_finalize"]
    body = function(text, "affine_gather_qmm_rhs").replace("[[kernel]] void", "inline void")
    body = steel(body).replace("mlx::steel::", "")
    # Its arrays of halves are copied to 16 bytes at a time.
    for name, rows in [("Xs", "BM"), ("Ws", "BN")]:
        aligned = f"threadgroup float4 {name}_of[{rows} * BK_padded / 8];"
        aligned += f" threadgroup T* {name} = (threadgroup T*){name}_of;"
        body = re.sub(rf"threadgroup T {name}\[[^;]*\];", aligned, body)
    flags = "".join(f"constant constexpr bool align_{axis} = true;\n" for axis in "MNK")
    source = head + flags + "".join(plain(function(utils, name)) for name in loops) + body + """
kernel void counted(device const half* x [[buffer(0)]], device const uint* w [[buffer(1)]],
                    device const half* scales [[buffer(2)]], device const half* biases [[buffer(3)]],
                    device const uint* indices [[buffer(4)]], device half* y [[buffer(5)]],
                    constant int& m [[buffer(6)]], constant int& n [[buffer(7)]], constant int& k [[buffer(8)]],
                    uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    affine_gather_qmm_rhs<half, 64, 4, 16, 32, 32, 1, 2, true>(x, w, scales, biases, indices, y, m, n, k, group, sg,
                                                               lane);
}
"""
    slots = [(0, "z", 64 * 2 * K), (1, "z", N * K), (2, "z", N * K // 16), (3, "z", N * K // 16)]
    slots += [(4, "r", b"".join(number(pair // 32) for pair in range(64))), (5, "w", 64 * 2 * N)]
    slots += [(6, "p", number(64)), (7, "p", number(N)), (8, "p", number(K))]
    yield "32 pairs of an expert, MLX 4 bits", "MLX", (source, slots, (N // 32, 4, 1), 64, 64 * N * K)

    # As MLX's host chooses for small products of transposed weights: rows of 64, of which 32 are there.
    for name, t in [("F16", "half"), ("BF16", "bfloat")]:
        source = classes + f"""
typedef {t} T;
""" + """
kernel void counted(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]], device T* y [[buffer(2)]],
                    constant int& k [[buffer(3)]], constant int& n [[buffer(4)]],
                    uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float4 xs_of[64 * 40 / 8], ws_of[32 * 40 / 8];
    threadgroup T* xs = (threadgroup T*)xs_of;
    threadgroup T* ws = (threadgroup T*)ws_of;
    BlockLoader<T, 64, 32, 40, 1, 128> from_x(x, k, xs, sg, lane);
    BlockLoader<T, 32, 32, 40, 1, 128> from_w(w + 32 * group.x * k, k, ws, sg, lane);
    BlockMMA<T, T, 64, 32, 32, 2, 2, false, true, 40, 40> sums(sg, lane);
    for (int i = 0; i < k / 32; i++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        from_x.load_safe(short2(32, 32));
        from_w.load_unsafe();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sums.mma(xs, ws);
        from_x.next();
        from_w.next();
    }
    sums.store_result_safe(y + 32 * group.x, n, short2(32, 32));
}
"""
        slots = [(0, "z", 64 * K), (1, "z", 2 * N * K), (2, "w", 64 * N), (3, "p", number(K)), (4, "p", number(N))]
        yield f"32 rows of x, {name}", "MLX", (source, slots, (N // 32, 1, 1), 128, 32 * N * K)


def mlx_prompt(folder):
    """Attention of a prompt, as `ggml_prompt` has it; the mask is computed."""
    text = (folder / "steel/attn/kernels/steel_attention.h").read_text()
    text = without_comments(re.sub(r"/\*.*?\*/", "", text, flags=re.S))
    ops = text[text.index("struct MaxOp") : text.index("template <\n", text.index("struct DivOp"))]
    params = re.search(r"struct AttnParams \{.*?\};\n", (folder / "steel/attn/params.h").read_text(), re.S).group(0)
    params += "struct AttnMaskParams { int64_t M_strides[3]; };\n"
    # As its host chooses for heads of 128.
    body = text[text.index("template <\n", text.index("struct DivOp")) :]
    body = re.sub(r"\[\[kernel,[^\]]*\]\] void", "inline void", body)
    flags = dict(align_Q="true", align_K="true", has_mask="false", do_causal="true", has_sinks="false")
    source = steel_classes(folder, "attn") + params + ops
    source += "".join(f"constant constexpr bool {name} = {value};\n" for name, value in flags.items())
    source += steel(body) + """
kernel void counted(device const half* q [[buffer(0)]], device const half* k [[buffer(1)]],
                    device const half* v [[buffer(2)]], device half* to [[buffer(3)]],
                    constant AttnParams& params [[buffer(4)]], constant AttnMaskParams& mask [[buffer(5)]],
                    uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    attention<half, 32, 16, 128, 4, 1, half, float>(q, k, v, to, &params, &mask, q, q, lane, sg, group, uint3(0));
}
"""
    keys, tokens, n_kv = KEYS // 32 * 32, 64, HEADS // GROUP
    rows, row = tokens // 32, HEADS * D
    # Heads of a token follow each other, keys of a head do.
    values = [1, HEADS, D, tokens, keys, GROUP, 1.0, rows, keys // 16, rows, keys // 16, 0, 0, keys - tokens]
    strides = [tokens * row, D, row, *[n_kv * keys * D, keys * D, D] * 2, tokens * row, D, row]
    params = struct.pack("<6if7i12q", *values, *strides)
    slots = [(0, "z", 2 * tokens * row), (1, "z", 2 * n_kv * keys * D), (2, "z", 2 * n_kv * keys * D)]
    slots += [(3, "w", 2 * tokens * row), (4, "p", params), (5, "p", bytes(24))]
    seen = sum(range(keys - tokens + 1, keys + 1))
    return "attention, prompt", "MLX", (source, slots, (rows, HEADS, 1), 128, 2 * HEADS * D * seen)


def mlx(root):
    """Every row of MLX's."""
    folder = root / "mlx/backend/metal/kernels"
    yield from mlx_tiles(folder)
    yield mlx_prompt(folder)
    text = without_comments((folder / "quantized.h").read_text())
    names = ["get_pack_factor", "get_bytes_per_pack", "load_vector", "qdot", "qmv_fast_impl"]
    source = MLX_HEAD + "".join(plain(function(text, name)) for name in names) + """
kernel void counted(device const uint* w [[buffer(0)]], device const half* scales [[buffer(1)]],
                    device const half* biases [[buffer(2)]], device const half* x [[buffer(3)]],
                    device half* y [[buffer(4)]], constant int& k [[buffer(5)]], constant int& n [[buffer(6)]],
                    uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    qmv_fast_impl<half, 64, 4>(w, scales, biases, x, y, k, n, group, sg, lane);
}
"""
    slots = [(0, "z", N * K // 2), (1, "z", N * K // 32), (2, "z", N * K // 32), (3, "z", 2 * K), (4, "w", 2 * N)]
    slots += [(5, "p", struct.pack("<i", K)), (6, "p", struct.pack("<i", N))]
    yield "one row of x, MLX 4 bits", "MLX", (source, slots, (1, N // 8, 1), 64, N * K)

    text = without_comments((folder / "sdpa_vector.h").read_text())
    body = function(text, "sdpa_vector")
    body = body.replace("[[kernel]] void", "inline void").replace("template <typename T, int D, int V = D>", "")
    body = re.sub(r"\[\[.*?\]\]", "", body, flags=re.S).replace("const device bool*", "device const uchar*")
    shared = re.findall(r"threadgroup U (\w+)\[([^\]]+)\];", body)
    body = re.sub(r"threadgroup U (\w+)\[([^\]]+)\];", "", body)
    size_of = lambda size: size.replace("BN", "32").replace("BD", "32")
    arrays = "".join(f"    threadgroup float {name}[{size_of(size)}];\n" for name, size in shared)
    # What the kernel takes by its call is a local of one that has it all.
    statements = body[body.index("{") + 1 : body.rindex("}")]
    source = MLX_HEAD + """
#define T half
#define D 128
#define V 128
constant constexpr bool has_mask = false, query_transposed = false, do_causal = false;
constant constexpr bool bool_mask = false, float_mask = false, has_sinks = false;
kernel void counted(device const T* queries [[buffer(0)]], device const T* keys [[buffer(1)]],
                    device const T* values [[buffer(2)]], device T* out [[buffer(3)]],
                    constant int& gqa_factor [[buffer(4)]], constant int& N [[buffer(5)]],
                    constant ulong& k_head_stride [[buffer(6)]], constant ulong& k_seq_stride [[buffer(7)]],
                    constant ulong& v_head_stride [[buffer(8)]], constant ulong& v_seq_stride [[buffer(9)]],
                    constant float& scale [[buffer(10)]], uint3 tid [[threadgroup_position_in_grid]],
                    uint3 tpg [[threadgroups_per_grid]], uint simd_gid [[simdgroup_index_in_threadgroup]],
                    uint simd_lid [[thread_index_in_simdgroup]]) {
""" + arrays + """
    const int mask_kv_seq_stride = 0, mask_q_seq_stride = 0, mask_head_stride = 0, num_q_heads = 1;
    device const T* fmask = queries;
    device const T* sinks = queries;
    device const T* bmask = queries;
""" + statements + "}\n"
    kv = HEADS // GROUP * KEYS * D * 2
    slots = [(0, "z", HEADS * D * 2), (1, "z", kv), (2, "z", kv), (3, "w", HEADS * D * 2)]
    slots += [(4, "p", struct.pack("<i", GROUP)), (5, "p", struct.pack("<i", KEYS))]
    slots += [(i, "p", struct.pack("<Q", stride)) for i, stride in [(6, KEYS * D), (7, D), (8, KEYS * D), (9, D)]]
    slots += [(10, "p", struct.pack("<f", 1.0))]
    yield "attention, token", "MLX", (source, slots, (HEADS, 1, 1), 1024, HEADS * 2 * D * KEYS)


def count(program, work):
    """What the simulator counts, by name."""
    source, slots, grid, threads, _ = work
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counted.metal"
        path.write_text(source)
        words = [program, "run", str(path), "counted", "--count"]
        words += ["--groups", ",".join(map(str, grid)), "--threads", str(threads)]
        for slot, kind, value in slots:
            if kind in "pr":
                value = ",".join(map(str, struct.unpack(f"<{len(value) // 4}i", value)))
            words.append(f"{slot}={kind}:{value}")
        out = subprocess.run(words, capture_output=True, text=True)
    if out.returncode != 0:
        raise SystemExit(f"{out.stderr.strip()}\n")
    return {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", out.stdout)}


def main():
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    program = sys.argv[3] if len(sys.argv) == 4 else "target/debug/metal-sim"
    for what, engine, work in [*ggml(Path(sys.argv[1])), *mlx(Path(sys.argv[2]))]:
        counts, all_work = count(program, work), work[-1]
        each = [counts[name] / all_work for name in ("loads", "load_bytes", "muls", "instructions")]
        numbers = f"{each[0]:.3f} | {each[1]:.3f} | {each[2]:.2f} | {each[3]:.2f}"
        rest = [counts[name] for name in ("collectives", "matrices", "shared_size", "barriers")]
        print(f"| {what} | {engine} | {numbers} | {' | '.join(map(str, rest))} |", flush=True)


if __name__ == "__main__":
    main()
