// The simulated GPU: a process that owns the buffers, loads compiled kernels and replays command lists, one threadgroup
// after the other, each of its threads a fiber. Kernels are compiled with the hooks of clang's thread sanitizer, which
// are defined here: every load and store of a kernel is checked before it happens.
//
// Commands come on standard input, answers go to standard output; `protocol.rs` is the other side.
#include <algorithm>
#include <dlfcn.h>
#include <immintrin.h>
#include <map>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

namespace sim {
struct P {
    int kind, index;
};
struct Ctx {
    void* const* buf;
};
struct Kernel {
    const char* name;
    void (*run)(const Ctx&);
    int n;
    const P* p;
    const int* size;
    const int* ro;
    const int* ref;
};
} // namespace sim
typedef void (*CollectiveFn)(void**, u32);

// ---- switching between fibers
extern "C" void sim_switch(void** save, void* to);
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch,@function
sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sim_switch,.-sim_switch
)");

// ---- what the runner knows
enum State : u8 { READY, SIMD, BARRIER, DONE };
// A thread of the running threadgroup, on a stack of its own. The last five fields are what it waits for.
struct Lane {
    void* sp;
    char* stack;
    State state;
    u16 id, sg;
    u8 lane;
    CollectiveFn fn;
    void* arg;
    const char* what;
    int site;  // line << 10 | column
    int flags; // of a barrier, or how strict a collective is
};

// Who touched a word last: the thread, and the execution and memory epochs of its threadgroup and simdgroup then.
struct Who {
    u16 lane, x, m, s, ss;
};
// The history of four bytes of memory that kernels write: the last writer, and up to three readers.
struct Cell {
    u32 wd, wtg, rd, rtg; // dispatches and threadgroups, by serial numbers
    Who w, r0, r1, r2;    // r0 last reader, r1 an earlier one of its simdgroup, r2 one of another
    u8 flags, wm, rm;     // wm, rm: which of the four bytes
};
enum { WR = 1, RD0 = 2, RD1 = 4, RD2 = 8, RD_TG = 16, RD_MANY = 32, W_ATOM = 64 };

struct Buffer {
    std::string name;
    u64 size = 0, mapped = 0;
    u8* base = nullptr;
    u8* init = nullptr;    // a byte a byte: written by anybody
    Cell* cells = nullptr; // once a kernel may write
};

enum Use { READ, WRITE, UPDATE };
enum Kind { DEVICE, THREADGROUP, PARAMS };
// Memory that the running dispatch may touch.
struct Region {
    u8* base;
    u64 size;
    Kind kind;
    int slot; // or the id of a threadgroup variable
    int use;
    Buffer* buf;
    u8* init;
    Cell* cells; // of the first word that holds a byte of the region
    const char* name;
    bool touched;
};

struct Module {
    std::string path;
    void* handle = nullptr;
    const sim::Kernel* kernels = nullptr;
    int n = 0;
    u64 base = 0;
};

struct Dispatch {
    u32 serial;
    int module;
    const sim::Kernel* kernel;
    u32 grid[3], threads;
    std::vector<Region> regions;
    std::vector<std::vector<u8>> params;
    void* slots[32];
};

// As `Schedule` of options.rs.
enum Order { FORWARD, REVERSE, RANDOM, AHEAD, LOCKSTEP, PREEMPT };
struct Settings {
    u32 order, seed, reduce, ulp;
};

static const size_t STACK = 256 * 1024;
static const u64 PAGE = 4096;
static const u32 MAX_TG_MEMORY = 32768;

static std::vector<Buffer*> buffers;
static std::vector<Module> modules;
static Settings settings;
static std::vector<Lane> lanes;
static char* stacks;
static u32 n_lanes; // of the running threadgroup
static Lane* cur;
static void* scheduler_sp;
static bool running;
static u64 rng;

static Dispatch* now;
static u32 serial, epoch_first, submit_first; // serial numbers of dispatches start at 1
static std::vector<std::string> names;        // of the dispatches of this submit
static u32 tg_serial, tg_pos[3];
static std::map<int, int> tg_vars; // id to region
static std::vector<Region> tg_regions;
static u64 tg_used;
static u32 ep_x, ep_tg, ep_dev;               // epochs of the threadgroup: barriers, and those with a memory flag
static u32 sg_x[64], sgm_tg[64], sgm_dev[64]; // of each simdgroup
static sigjmp_buf bail;
static bool bail_armed;

extern "C" {
int sim_reduce_order;
}

// ---- reports
struct Report {
    std::string kind, text;
    int module;
    u64 pc; // in the module; 0 unless known
    u64 count;
};
static std::vector<Report> reports;

static void report(const char* kind, u64 pc, const char* format, ...) {
    const int module = now ? now->module : -1;
    if (module >= 0 && pc >= modules[module].base) pc -= modules[module].base;
    for (Report& r : reports) {
        if (r.kind == kind && r.pc == pc && r.module == module) {
            r.count++;
            return;
        }
    }
    if (reports.size() >= 32) return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    reports.push_back({kind, (now ? std::string(now->kernel->name) + ": " : std::string()) + text, module, pc, 1});
}
[[noreturn]] static void give_up() { siglongjmp(bail, 1); }

static const char* who() {
    static char text[96];
    if (!cur) return "?";
    snprintf(text, sizeof text, "threadgroup (%u, %u, %u) thread %u", tg_pos[0], tg_pos[1], tg_pos[2], cur->id);
    return text;
}
static const std::string& name_of(u32 dispatch) { return names[dispatch - submit_first]; }

// ---- fibers
static u64 next_random() {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng;
}
static void to_scheduler() { sim_switch(&cur->sp, scheduler_sp); }
static void resume(Lane* lane) {
    cur = lane;
    running = true;
    sim_switch(&scheduler_sp, lane->sp);
    running = false;
    cur = nullptr;
}
static void lane_main() {
    const sim::Ctx context{now->slots};
    now->kernel->run(context);
    cur->state = DONE;
    for (;;) to_scheduler();
}
static void start_lane(Lane* lane) {
    void** s = (void**)(lane->stack + STACK);
    *--s = nullptr;
    *--s = (void*)lane_main;
    for (int i = 0; i < 6; i++) *--s = nullptr;
    lane->sp = s;
    lane->state = READY;
}

// ---- calls from kernels
extern "C" {
void sim_collective(CollectiveFn fn, void* arg, const char* what, int site, int strict) {
    cur->fn = fn, cur->arg = arg, cur->what = what, cur->site = site, cur->flags = strict;
    cur->state = SIMD;
    to_scheduler();
}
void sim_tg_barrier(unsigned flags, int site) {
    cur->site = site, cur->flags = (int)flags, cur->what = "threadgroup_barrier";
    cur->state = BARRIER;
    to_scheduler();
}
unsigned sim_lane(void) { return cur->lane; }
void sim_bad_lane(const char* what) { report("simd-inactive", 0, "%s by %s", what, who()); }
struct MatSync {
    const volatile void* p;
    u64 stride, ox, oy;
    bool transposed;
};
void sim_mat_uniform(void** args, u32 mask) {
    MatSync* first = nullptr;
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        MatSync* s = (MatSync*)args[i];
        if (!first) first = s;
        if (s->p != first->p || s->stride != first->stride || s->transposed != first->transposed)
            report("matrix-nonuniform", 0, "simdgroup_load or simdgroup_store: arguments differ between lanes");
    }
}
// Off by up to `ulp` units in the last place, the same for the same number.
float sim_perturb(float x) {
    const int ulp = (int)settings.ulp;
    if (ulp == 0) return x;
    u32 bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) == 0x7f800000 || (bits & 0x7fffffff) < 0x01000000) return x;
    u32 hash = bits * 2654435761u;
    hash ^= hash >> 15;
    bits += (u32)((int)(hash % (2 * (u32)ulp + 1)) - ulp);
    memcpy(&x, &bits, 4);
    return x;
}
// As ATTRIBUTES of rewrite.rs.
void sim_builtin(int kind, u32* out) {
    const u32 *grid = now->grid, threads = now->threads;
    const u32 size[3] = {threads, 1, 1}, at[3] = {cur->id, 0, 0};
    out[0] = out[1] = out[2] = 0;
    for (int i = 0; i < 3; i++) {
        switch (kind) {
        case 2:
            out[i] = tg_pos[i] * size[i] + at[i];
            break;
        case 3:
            out[i] = at[i];
            break;
        case 4:
            out[i] = tg_pos[i];
            break;
        case 5:
            out[i] = size[i];
            break;
        case 6:
            out[i] = grid[i];
            break;
        case 7:
            out[i] = grid[i] * size[i];
            break;
        }
    }
    switch (kind) {
    case 8:
        out[0] = cur->id;
        break;
    case 9:
        out[0] = cur->lane;
        break;
    case 10:
        out[0] = cur->sg;
        break;
    case 11:
        out[0] = threads / 32;
        break;
    case 12:
        out[0] = 32;
        break;
    }
}
void* sim_tgvar(int id, size_t size, size_t, const char* name, int line) {
    auto found = tg_vars.find(id);
    if (found != tg_vars.end()) return tg_regions[found->second].base;
    (void)line;
    const u64 words = (size + 3) / 4;
    Region r{};
    r.base = (u8*)aligned_alloc(16, (size + 15) / 16 * 16);
    memset(r.base, 0xff, size);
    r.size = size, r.kind = THREADGROUP, r.slot = id, r.use = UPDATE, r.name = name;
    r.init = (u8*)calloc(size, 1);
    r.cells = (Cell*)calloc(words, sizeof(Cell));
    tg_vars[id] = (int)tg_regions.size();
    tg_regions.push_back(r);
    tg_used += (size + 15) / 16 * 16;
    if (tg_used > MAX_TG_MEMORY)
        report("threadgroup-memory", 0, "%lu bytes, at most %u", (unsigned long)tg_used, MAX_TG_MEMORY);
    return r.base;
}
}
static void drop_tg_regions() {
    for (Region& r : tg_regions) free(r.base), free(r.init), free(r.cells);
    tg_regions.clear();
    tg_vars.clear();
    tg_used = 0;
}

// ---- every load and store
static const char* place(const Region& r) {
    static char text[96];
    if (r.kind == THREADGROUP) snprintf(text, sizeof text, "threadgroup %s", r.name);
    else if (r.kind == PARAMS) snprintf(text, sizeof text, "parameters in slot %d", r.slot);
    else snprintf(text, sizeof text, "slot %d (%s)", r.slot, r.name);
    return text;
}
static const char* verb(bool w) { return w ? "write" : "read"; }

static Region* find(u8* p) {
    static Region* last_device;
    static u32 last_dispatch;
    if (last_dispatch == now->serial && last_device && p >= last_device->base &&
        p < last_device->base + last_device->size)
        return last_device;
    for (Region& r : now->regions) {
        if (p >= r.base && p < r.base + r.size) {
            last_device = &r, last_dispatch = now->serial;
            return &r;
        }
    }
    for (Region& r : tg_regions)
        if (p >= r.base && p < r.base + r.size) return &r;
    return nullptr;
}

// An access to memory that nothing bound.
static void astray(u8* p, u64 n, bool w, u64 pc) {
    for (const Buffer* b : buffers) {
        if (p < b->base || p >= b->base + b->mapped) continue;
        const unsigned long at = p - b->base;
        std::string spans;
        for (const Region& r : now->regions) {
            if (r.buf != b) continue;
            char text[80];
            snprintf(text, sizeof text, "; slot %d has %lu..%lu", r.slot, (unsigned long)(r.base - b->base),
                     (unsigned long)(r.base - b->base + r.size));
            spans += text;
        }
        report("out-of-bounds", pc, "%s of %lu bytes at byte %lu of %s (%lu bytes), in no bound span, by %s%s", verb(w),
               (unsigned long)n, at, b->name.c_str(), (unsigned long)b->size, who(), spans.c_str());
        give_up();
    }
    for (const Region& r : tg_regions) {
        const long past = p - (r.base + r.size), before = r.base - p;
        if ((past >= 0 && past < 65536) || (before > 0 && before < 65536)) {
            report("out-of-bounds", pc, "%s of %lu bytes near %s (%lu bytes) by %s", verb(w), (unsigned long)n,
                   place(r), (unsigned long)r.size, who());
            give_up();
        }
    }
    for (const Region& r : now->regions) {
        const long past = p - (r.base + r.size);
        if (r.kind == PARAMS && past >= 0 && past < 4096) {
            report("out-of-bounds", pc, "%s %ld bytes behind %s (%lu bytes) by %s", verb(w), past, place(r),
                   (unsigned long)r.size, who());
            give_up();
        }
    }
    Dl_info info;
    if (dladdr(p, &info) && (u64)info.dli_fbase == modules[now->module].base) return; // a constant of the program
    report("wild-pointer", pc, "%s of %lu bytes in no buffer by %s", verb(w), (unsigned long)n, who());
    give_up();
}

static void race(const Region& r, u64 at, bool w, bool earlier_w, u32 lane, const char* kind, u64 pc) {
    const char* why = !strcmp(kind, "race-threadgroups") ? "of another threadgroup"
                      : !strcmp(kind, "fence")           ? "behind a barrier without the flag of this memory"
                      : !strcmp(kind, "race-simdgroup")  ? "of the same simdgroup, without simdgroup_barrier"
                                                         : "with no barrier between";
    report(kind, pc, "%s of byte %lu of %s by %s meets an earlier %s by thread %u %s", verb(w), (unsigned long)at,
           place(r), who(), verb(earlier_w), lane, why);
}

static void hazard(const Region& r, u64 at, bool w, bool earlier_w, u32 other, u64 pc) {
    report("hazard", pc, "%s of byte %lu of %s meets a %s by dispatch %u (%s) with no barrier between the dispatches",
           verb(w), (unsigned long)at, place(r), verb(earlier_w), other - submit_first, name_of(other).c_str());
}

// The word's history against this access, and the access into its history.
static void check_word(Region& r, Cell& c, u64 at, u8 mask, bool w, bool atom, const Who& me, u64 pc) {
    const u32 D = now->serial, T = tg_serial;
    bool raced = false;
    const auto same_sg = [&](const Who& o) { return o.lane / 32 == me.lane / 32; };
    const auto cross = [&](const Who& o, bool ow) {
        if (!raced) race(r, at, w, ow, o.lane, "race-threadgroups", pc);
        raced = true;
    };
    // Another thread of this threadgroup.
    const auto conflict = [&](const Who& o, bool ow) {
        if (raced || o.lane == me.lane || o.m != me.m) return; // a barrier with the right flag lies between
        if (same_sg(o) && o.s != me.s) return;                 // or a simdgroup_barrier with it
        const char* kind = o.x != me.x ? "fence" : same_sg(o) && o.ss != me.ss ? "race-simdgroup" : "race";
        race(r, at, w, ow, o.lane, kind, pc);
        raced = true;
    };
    if ((c.flags & WR) && (c.wm & mask) && !(atom && (c.flags & W_ATOM))) {
        if (c.wd == D) {
            if (c.wtg != T) cross(c.w, true);
            else conflict(c.w, true);
        } else if (c.wd >= epoch_first) {
            hazard(r, at, w, true, c.wd, pc);
        }
    }
    if (w) {
        if ((c.flags & RD0) && (c.rm & mask) && c.rd >= epoch_first) {
            if (c.rd != D || (c.flags & RD_MANY)) hazard(r, at, true, false, c.rd, pc);
            if (c.rd == D && (c.rtg != T || (c.flags & RD_TG))) cross(c.r0, false);
            else if (c.rd == D) {
                if (!same_sg(c.r0)) conflict(c.r0, false);
                if (c.flags & RD2) conflict(c.r2, false);
                conflict(c.r0, false);
                if (c.flags & RD1) conflict(c.r1, false);
            }
        }
        // Bytes of the word that the thread wrote before a barrier are no part of this write.
        const bool is_epoch = r.kind != THREADGROUP || c.w.m == me.m;
        const bool same = (c.flags & WR) && c.wd == D && c.wtg == T && c.w.lane == me.lane && is_epoch;
        c.wm = same ? c.wm | mask : mask;
        c.wd = D, c.wtg = T, c.w = me;
        c.flags = (u8)((c.flags & ~W_ATOM) | WR | (atom ? W_ATOM : 0));
        return;
    }
    if ((c.flags & RD0) && c.rd != D) {
        const bool many = c.rd >= epoch_first;
        c.flags = (u8)((c.flags & ~(RD0 | RD1 | RD2 | RD_TG | RD_MANY)) | (many ? RD_MANY : 0));
        if (!many) c.rm = 0;
    } else if ((c.flags & RD0) && c.rtg != T) {
        c.flags = (u8)((c.flags | RD_TG) & ~(RD0 | RD1 | RD2));
    }
    if ((c.flags & RD0) && c.r0.lane != me.lane) {
        if (same_sg(c.r0)) c.r1 = c.r0, c.flags |= RD1;
        else c.r2 = c.r0, c.flags = (u8)((c.flags | RD2) & ~RD1);
    }
    c.rd = D, c.rtg = T, c.r0 = me, c.rm |= mask, c.flags |= RD0;
}

static void access(const void* address, u64 n, bool w, u64 pc, bool aligned, bool atom) {
    if (!running) return;
    u8* p = (u8*)address;
    if (p >= (u8*)cur->stack && p < (u8*)cur->stack + STACK) return;
    if (settings.order == LOCKSTEP || (settings.order == PREEMPT && (next_random() & 7) == 0)) to_scheduler();
    if (aligned && n > 1 && ((u64)p & (n - 1)))
        report("misaligned", pc, "%s of %lu bytes at an address that is a multiple of %lu by %s", verb(w),
               (unsigned long)n, (unsigned long)((u64)p & -(u64)p), who());
    Region* r = find(p);
    if (!r) {
        astray(p, n, w, pc);
        return;
    }
    const u64 at = (u64)(p - r->base);
    if (at + n > r->size) {
        report("out-of-bounds", pc, "%s of %lu bytes across the end of %s (%lu bytes) by %s", verb(w), (unsigned long)n,
               place(*r), (unsigned long)r->size, who());
        give_up();
    }
    r->touched = true;
    if (w && r->use == READ) {
        report("undeclared", pc, "write to %s, which is bound to be read, by %s", place(*r), who());
        give_up();
    }
    if (!w && r->init) {
        bool all = true;
        for (u64 i = at; i < at + n; i++) all &= r->init[i] != 0;
        if (!all)
            report(r->use == WRITE ? "undeclared" : "unwritten", pc,
                   "read of byte %lu of %s, which nothing has written%s, by %s", (unsigned long)at, place(*r),
                   r->use == WRITE ? " since it was bound to be written" : "", who());
    }
    if (w && r->init) memset(r->init + at, 1, n);
    if (!r->cells) return;
    const Who me{cur->id, (u16)ep_x, (u16)(r->kind == THREADGROUP ? ep_tg : ep_dev),
                 (u16)(r->kind == THREADGROUP ? sgm_tg : sgm_dev)[cur->sg], (u16)sg_x[cur->sg]};
    // Regions begin where words do, as `rules.rs` sees to.
    for (u64 word = at / 4; word <= (at + n - 1) / 4; word++) {
        const u64 from = std::max(at, 4 * word) - 4 * word, to = std::min(at + n, 4 * word + 4) - 4 * word;
        const u8 mask = (u8)(((1u << to) - 1) & ~((1u << from) - 1));
        check_word(*r, r->cells[word], 4 * word + from, mask, w, atom, me, pc);
    }
}

#define PC ((u64)__builtin_return_address(0) - 1)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}
#define HOOKS(n)                                                                                                       \
    void __tsan_read##n(void* p) { access(p, n, false, PC, true, false); }                                             \
    void __tsan_write##n(void* p) { access(p, n, true, PC, true, false); }                                             \
    void __tsan_unaligned_read##n(void* p) { access(p, n, false, PC, false, false); }                                  \
    void __tsan_unaligned_write##n(void* p) { access(p, n, true, PC, false, false); }                                  \
    void __tsan_volatile_read##n(void* p) { access(p, n, false, PC, true, false); }                                    \
    void __tsan_volatile_write##n(void* p) { access(p, n, true, PC, true, false); }                                    \
    void __tsan_read_write##n(void* p) {                                                                               \
        access(p, n, false, PC, true, false);                                                                          \
        access(p, n, true, PC, true, false);                                                                           \
    }                                                                                                                  \
    void __tsan_unaligned_read_write##n(void* p) {                                                                     \
        access(p, n, false, PC, false, false);                                                                         \
        access(p, n, true, PC, false, false);                                                                          \
    }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void* __tsan_memcpy(void* to, const void* from, size_t n) {
    if (n) access(from, n, false, PC, false, false), access(to, n, true, PC, false, false);
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
    if (n) access(from, n, false, PC, false, false), access(to, n, true, PC, false, false);
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int c, size_t n) {
    if (n) access(to, n, true, PC, false, false);
    return memset(to, c, n);
}
void sim_atomic(const volatile void* p, size_t n) { access((const void*)p, n, true, PC, true, true); }

// A finite number that is none as a half: `runtime/msl` calls it.
void sim_half_overflow(float x, u64 pc) { report("half-overflow", pc - 1, "%g becomes infinite by %s", x, who()); }

// Undefined behaviour that clang finds by itself.
struct Location {
    const char* file;
    u32 line, column;
};
static void undefined(const char* what, void* data, long value) {
    const Location* l = (const Location*)data;
    report("undefined", 0, "%s (%ld) at %s:%u:%u by %s", what, value, l->file, l->line, l->column, who());
}
void __ubsan_handle_out_of_bounds(void* d, u64 i) {
    undefined("array index out of bounds", d, (long)(int)i);
    give_up(); // going on would overwrite the fiber's stack
}
void __ubsan_handle_shift_out_of_bounds(void* d, u64, u64 b) { undefined("shift out of range", d, (long)(int)b); }
void __ubsan_handle_divrem_overflow(void* d, u64, u64 b) {
    undefined("division by zero or overflow", d, (long)(int)b);
    give_up(); // the processor would trap
}
void __ubsan_handle_add_overflow(void* d, u64 a, u64) { undefined("signed overflow in +", d, (long)(int)a); }
void __ubsan_handle_sub_overflow(void* d, u64 a, u64) { undefined("signed overflow in -", d, (long)(int)a); }
void __ubsan_handle_mul_overflow(void* d, u64 a, u64) { undefined("signed overflow in *", d, (long)(int)a); }
void __ubsan_handle_negate_overflow(void* d, u64 a) { undefined("signed overflow in unary -", d, (long)a); }
void __ubsan_handle_float_cast_overflow(void* d, u64 a) { undefined("float to integer out of range", d, (long)a); }
void __ubsan_handle_vla_bound_not_positive(void* d, u64 a) { undefined("length of an array", d, (long)a); }
}

static void on_signal(int number, siginfo_t* info, void*) {
    if (!bail_armed || !running) {
        signal(number, SIG_DFL);
        return;
    }
    const u8* at = (const u8*)info->si_addr;
    const bool is_stack = at >= (u8*)stacks && at < (u8*)stacks + (STACK + PAGE) * 1024;
    report("fault", 0, "%s by %s", is_stack ? "a thread's stack overflows" : "memory fault", who());
    give_up();
}

// ---- one threadgroup
static std::vector<Lane*> lane_order;
static void run_lanes(int sg_only) {
    for (bool any = true; any;) {
        any = false;
        for (u32 i = 0; i < n_lanes; i++) {
            Lane* l = lane_order[i];
            if (l->state == READY && (sg_only < 0 || l->sg == sg_only)) resume(l), any = true;
        }
    }
}
// All lanes of the simdgroup are stopped: runs one collective, the one that stands first in the source.
static bool resolve(int sg) {
    Lane* first = nullptr;
    u32 mask = 0;
    void* args[32];
    for (int i = sg * 32; i < sg * 32 + 32; i++) {
        Lane& l = lanes[i];
        if (l.state == READY) return false;
        if (l.state == SIMD && (!first || l.site < first->site)) first = &l;
    }
    if (!first) return false;
    for (int i = sg * 32; i < sg * 32 + 32; i++) {
        Lane& l = lanes[i];
        if (l.state == SIMD && l.site == first->site && l.fn == first->fn) mask |= 1u << l.lane, args[l.lane] = l.arg;
    }
    if (mask != ~0u)
        report("simd-divergent", 0, "%s at line %d runs in lanes %08x only, in threadgroup (%u, %u, %u)", first->what,
               first->site >> 10, mask, tg_pos[0], tg_pos[1], tg_pos[2]);
    first->fn(args, mask);
    sg_x[sg]++;
    if ((first->flags & 3) == 2) {
        const u32 flags = (u32)first->flags >> 8;
        if (flags & 2) sgm_tg[sg]++;
        if (flags & 1) sgm_dev[sg]++;
    }
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) lanes[sg * 32 + i].state = READY;
    return true;
}
template <class T> static void shuffle(std::vector<T>& v, size_t n) {
    for (size_t i = n; i-- > 1;) std::swap(v[i], v[next_random() % (i + 1)]);
}
static void run_threadgroup() {
    const int n_sg = (int)n_lanes / 32;
    lane_order.resize(n_lanes);
    for (u32 i = 0; i < n_lanes; i++) {
        Lane* l = &lanes[i];
        l->id = (u16)i, l->lane = (u8)(i % 32), l->sg = (u16)(i / 32);
        start_lane(l);
        lane_order[i] = &lanes[settings.order == REVERSE ? n_lanes - 1 - i : i];
    }
    std::vector<int> sgs(n_sg);
    for (int i = 0; i < n_sg; i++) sgs[i] = i;
    for (;;) {
        if (settings.order == RANDOM || settings.order == AHEAD || settings.order == PREEMPT)
            shuffle(lane_order, n_lanes), shuffle(sgs, sgs.size());
        if (settings.order == AHEAD) {
            // Each simdgroup runs to its barrier before the next one starts.
            for (int s : sgs) {
                do run_lanes(s);
                while (resolve(s));
            }
        } else if (settings.order == RANDOM) {
            // A simdgroup drawn at random makes one step.
            for (;;) {
                std::vector<int> can;
                for (int s = 0; s < n_sg; s++) {
                    bool ready = false;
                    for (int i = s * 32; i < s * 32 + 32; i++)
                        ready |= lanes[i].state == READY || lanes[i].state == SIMD;
                    if (ready) can.push_back(s);
                }
                if (can.empty()) break;
                const int s = can[next_random() % can.size()];
                run_lanes(s);
                resolve(s);
            }
        } else {
            for (bool moved = true; moved;) {
                run_lanes(-1);
                moved = false;
                for (int s = 0; s < n_sg; s++) moved |= resolve(s);
            }
        }
        u32 done = 0, waiting = 0, flags = ~0u;
        int site = -1;
        bool mixed = false;
        for (u32 i = 0; i < n_lanes; i++) {
            const Lane& l = lanes[i];
            if (l.state == DONE) {
                done++;
                continue;
            }
            waiting++;
            mixed |= site >= 0 && site != l.site;
            if (site < 0) site = l.site;
            flags &= (u32)l.flags;
        }
        if (!waiting) break;
        if (done)
            report("barrier-divergent", 0,
                   "%u of %u threads return before the barrier at line %d, in threadgroup (%u, %u, %u)", done, n_lanes,
                   site >> 10, tg_pos[0], tg_pos[1], tg_pos[2]);
        if (mixed)
            report("barrier-divergent", 0,
                   "threads wait at different barriers, one at line %d, in threadgroup (%u, %u, %u)", site >> 10,
                   tg_pos[0], tg_pos[1], tg_pos[2]);
        for (u32 i = 0; i < n_lanes; i++)
            if (lanes[i].state == BARRIER) lanes[i].state = READY;
        ep_x++;
        if (flags & 2) ep_tg++;
        if (flags & 1) ep_dev++;
    }
}

// ---- an epoch: dispatches between two barriers, as one pool of threadgroups
static void prepare(Dispatch& d) {
    for (Region& r : d.regions) {
        if (r.kind != DEVICE || r.use == READ) continue;
        if (r.use == WRITE) {
            memset(r.base, 0xff, r.size);
            memset(r.init, 0, r.size);
        }
    }
}
// A span that is bound to several slots is touched through the first of them.
static bool is_touched(const Dispatch& d, const Region& r) {
    for (const Region& other : d.regions)
        if (other.touched && other.base < r.base + r.size && r.base < other.base + other.size) return true;
    return false;
}
static void finish(Dispatch& d) {
    now = &d;
    for (Region& r : d.regions) {
        if (r.kind != DEVICE || r.size == 0) continue;
        if (r.use == WRITE) {
            const u8* hole = (const u8*)memchr(r.init, 0, r.size);
            if (hole)
                report("undeclared", 0, "byte %lu of %s (%lu bytes) is bound to be written and was not",
                       (unsigned long)(hole - r.init), place(r), (unsigned long)r.size);
        } else if (!is_touched(d, r)) {
            report("undeclared", 0, "%s is bound to be %s and was not touched", place(r),
                   r.use == READ ? "read" : "updated");
        }
    }
    now = nullptr;
}
static bool run_epoch(std::vector<Dispatch>& epoch) {
    std::vector<std::pair<u32, u32>> pool;
    for (u32 i = 0; i < epoch.size(); i++) {
        const u32* g = epoch[i].grid;
        for (u32 t = 0; t < g[0] * g[1] * g[2]; t++) pool.push_back({i, t});
        prepare(epoch[i]);
    }
    if (settings.order == REVERSE) std::reverse(pool.begin(), pool.end());
    if (settings.order == RANDOM || settings.order == AHEAD || settings.order == PREEMPT) shuffle(pool, pool.size());
    bail_armed = true;
    if (sigsetjmp(bail, 1) != 0) {
        bail_armed = running = false;
        cur = nullptr, now = nullptr;
        drop_tg_regions();
        return false;
    }
    for (const auto& item : pool) {
        now = &epoch[item.first];
        const u32 t = item.second, *g = now->grid;
        tg_pos[0] = t % g[0], tg_pos[1] = t / g[0] % g[1], tg_pos[2] = t / g[0] / g[1];
        tg_serial++;
        n_lanes = now->threads;
        run_threadgroup();
        drop_tg_regions();
    }
    bail_armed = false;
    now = nullptr;
    if (reports.empty())
        for (Dispatch& d : epoch) finish(d);
    return reports.empty();
}

// ---- the protocol: little-endian words, see protocol.rs
static void need(void* to, size_t n) {
    u8* p = (u8*)to;
    while (n > 0) {
        const ssize_t got = read(0, p, n);
        if (got <= 0) _exit(0); // the other side is gone
        p += got, n -= (size_t)got;
    }
}
static u32 get32() {
    u32 x;
    need(&x, 4);
    return x;
}
static u64 get64() {
    u64 x;
    need(&x, 8);
    return x;
}
static std::string get_text() {
    std::string s(get32(), ' ');
    need(&s[0], s.size());
    return s;
}
static std::string answer;
static void put32(u32 x) { answer.append((const char*)&x, 4); }
static void put64(u64 x) { answer.append((const char*)&x, 8); }
static void put_text(const std::string& s) {
    put32((u32)s.size());
    answer += s;
}
static void send_answer() {
    const u64 n = answer.size();
    std::string all((const char*)&n, 8);
    all += answer;
    for (size_t at = 0; at < all.size();) {
        const ssize_t put = write(1, all.data() + at, all.size() - at);
        if (put <= 0) _exit(0);
        at += (size_t)put;
    }
    answer.clear();
}

// 1: ok; 0 with a text: refused
static void allocate() {
    Buffer* b = new Buffer;
    b->size = get64();
    b->name = get_text();
    b->mapped = (b->size + 2 * PAGE) / PAGE * PAGE;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    b->base = (u8*)mmap(nullptr, b->mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
    b->init = (u8*)mmap(nullptr, b->mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (b->base == MAP_FAILED || b->init == MAP_FAILED) {
        put32(0);
        return;
    }
    buffers.push_back(b);
    put32(1);
}
static void load_module() {
    Module m;
    m.path = get_text();
    m.handle = dlopen(m.path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!m.handle) {
        put32(0);
        put_text(dlerror());
        return;
    }
    m.kernels = (const sim::Kernel*)dlsym(m.handle, "sim_kernels");
    m.n = *(const int*)dlsym(m.handle, "sim_n_kernels");
    Dl_info info;
    dladdr(m.kernels, &info);
    m.base = (u64)info.dli_fbase;
    put32(1);
    put32((u32)m.n);
    for (int i = 0; i < m.n; i++) {
        const sim::Kernel& k = m.kernels[i];
        put_text(k.name);
        put32((u32)k.n);
        for (int j = 0; j < k.n; j++) {
            put32((u32)k.p[j].kind), put32((u32)k.p[j].index);
            put32((u32)k.size[j]), put32((u32)k.ro[j]), put32((u32)k.ref[j]);
        }
    }
    modules.push_back(m);
}
static u64 nanoseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
}
static Region bind_span() {
    Region r{};
    r.slot = (int)get32();
    r.buf = buffers[get32()];
    const u64 at = get64();
    r.size = get64();
    r.use = (int)get32();
    r.kind = DEVICE, r.base = r.buf->base + at, r.init = r.buf->init + at, r.name = r.buf->name.c_str();
    if (r.use != READ && !r.buf->cells) {
        const u64 bytes = (r.buf->mapped / 4) * sizeof(Cell);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        r.buf->cells = (Cell*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (r.buf->cells == MAP_FAILED) _exit(3);
    }
    return r;
}
static Dispatch read_dispatch() {
    Dispatch d{};
    d.module = (int)get32();
    d.kernel = &modules[d.module].kernels[get32()];
    for (u32& g : d.grid) g = get32();
    d.threads = get32();
    const u32 n = get32();
    for (u32 i = 0; i < n; i++) {
        if (get32() == 0) {
            d.regions.push_back(bind_span());
            continue;
        }
        Region r{};
        r.slot = (int)get32();
        d.params.emplace_back(get32() + 16); // ends aligned as a struct may want it
        std::vector<u8>& bytes = d.params.back();
        r.size = bytes.size() - 16;
        need(bytes.data(), r.size);
        r.base = bytes.data(), r.kind = PARAMS, r.use = READ;
        d.regions.push_back(r);
    }
    return d;
}
// The parts of a dispatch that point into it, once it lies where it stays.
static void settle(Dispatch& d) {
    size_t param = 0;
    for (Region& r : d.regions) {
        if (r.kind == PARAMS) r.base = d.params[param++].data();
        else r.cells = r.buf->cells ? r.buf->cells + (r.base - r.buf->base) / 4 : nullptr;
        d.slots[r.slot] = r.base;
    }
    d.serial = ++serial;
    names.push_back(d.kernel->name);
}
static void submit() {
    settings.order = get32(), settings.seed = get32(), settings.reduce = get32(), settings.ulp = get32();
    rng = settings.seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
    sim_reduce_order = (int)settings.reduce;
    names.clear();
    reports.clear();
    submit_first = serial + 1;
    const u32 n_epochs = get32();
    std::vector<std::vector<Dispatch>> epochs(n_epochs);
    for (auto& epoch : epochs) {
        const u32 n = get32();
        for (u32 i = 0; i < n; i++) epoch.push_back(read_dispatch());
    }
    for (auto& epoch : epochs)
        for (Dispatch& d : epoch) settle(d);
    const u64 begin = nanoseconds();
    for (auto& epoch : epochs) {
        if (epoch.empty()) continue;
        epoch_first = epoch[0].serial;
        if (!run_epoch(epoch)) break;
    }
    put64(nanoseconds() - begin);
    put32((u32)reports.size());
    for (const Report& r : reports) {
        put_text(r.kind);
        put_text(r.text);
        put32((u32)r.module);
        put64(r.pc);
        put64(r.count);
    }
}

int main() {
    _mm_setcsr(_mm_getcsr() | 0x8040); // subnormals of f32 are zero, as on Apple's GPUs
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = (char*)mmap(nullptr, (STACK + PAGE) * 1024, PROT_READ | PROT_WRITE, flags, -1, 0);
    lanes.resize(1024);
    for (int i = 0; i < 1024; i++) {
        char* base = stacks + (STACK + PAGE) * i;
        mprotect(base, PAGE, PROT_NONE);
        lanes[i].stack = base + PAGE;
    }
    static char signal_stack[65536];
    stack_t alternate{};
    alternate.ss_sp = signal_stack, alternate.ss_size = sizeof signal_stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action{};
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
    for (;;) {
        switch (get32()) {
        case 0:
            allocate();
            break;
        case 1: {
            Buffer* b = buffers[get32()];
            const u64 at = get64(), n = get64();
            need(b->base + at, n);
            memset(b->init + at, 1, n);
            if (b->cells) memset((void*)(b->cells + at / 4), 0, ((at + n + 3) / 4 - at / 4) * sizeof(Cell));
            put32(1);
            break;
        }
        case 2: {
            const Buffer* b = buffers[get32()];
            const u64 at = get64(), n = get64();
            const u8* hole = (const u8*)memchr(b->init + at, 0, n);
            put64(hole ? (u64)(hole - b->init) : ~0ull); // first byte that nothing wrote
            answer.append((const char*)b->base + at, n);
            break;
        }
        case 3:
            load_module();
            break;
        case 4:
            submit();
            break;
        default:
            return 2;
        }
        send_answer();
    }
}
