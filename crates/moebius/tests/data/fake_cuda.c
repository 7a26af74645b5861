// A driver and a run-time compiler for tests on machines without a GPU: memory is the host's, kernels do nothing except
// for `pick_merge`, which finds one token, and variables plant faults. Built twice, as libcuda.so (DRIVER) and
// libnvrtc.so.
//
//   FAKE_VERSION       the driver's version (13000)     FAKE_DEVICES     number of devices (1)
//   FAKE_FREE          bytes of memory (8 GB)           FAKE_ARCH        compute capability (90)
//   FAKE_CLOCK         of its memory, in kHz            FAKE_EVENT_FAILS events cannot be made
//   FAKE_ALLOC_FAILS   this allocation fails            FAKE_TOKEN       the token that is always found (300)
//   FAKE_LAUNCH_FAULTS from this launch on (graphs' included) the device is faulty, found when a stream is waited for
//   FAKE_LOST          from this wait on the device is lost
//   FAKE_SYNCS         calls take the driver's lock, and some wait under it until no wait is without its answer, as the
//                      real ones do; queueing a wait takes so many microseconds
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

#ifdef DRIVER
enum { OK = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, FAULT = 700, LOST = 46 };
typedef struct { unsigned grid[3], block[3], shared; void* stream; void* attributes; unsigned n_attributes; } Config;

static _Atomic long n_allocs, n_launches, n_waits, taken;
static __thread long n_captured;
static __thread int is_capturing;
static _Atomic int sticky;

// The driver's lock, and words that the device waits for.
static pthread_mutex_t driver = PTHREAD_MUTEX_INITIALIZER;
enum { MOST_AWAITED = 64 };
static struct { volatile uint32_t* at; uint32_t value; } awaited[MOST_AWAITED];
static int n_awaited;

static int is_idle(void) {
    int n = 0;
    for (int i = 0; i < n_awaited; i++)
        if ((int32_t)(*awaited[i].at - awaited[i].value) < 0) awaited[n++] = awaited[i];
    n_awaited = n;
    return n == 0;
}
static void call(int is_sync) {
    if (!setting("FAKE_SYNCS", 0)) return;
    pthread_mutex_lock(&driver);
    while (is_sync && !is_idle()) usleep(20);
    pthread_mutex_unlock(&driver);
}
// A call that others wait behind, and one that waits itself until nothing is under way.
static void queues(void) { call(0); }
static void syncs(void) { call(1); }

static const char* text_of(int code) {
    switch (code) {
        case OUT_OF_MEMORY: return "out of memory";
        case NO_DEVICE: return "no CUDA-capable device is detected";
        case INVALID_DEVICE: return "invalid device ordinal";
        case FAULT: return "an illegal memory access was encountered";
        case LOST: return "CUDA-capable device(s) is/are busy or unavailable";
        default: return "an error";
    }
}

int cuGetErrorString(int code, const char** out) { *out = text_of(code); return OK; }
int cuDriverGetVersion(int* out) { *out = (int)setting("FAKE_VERSION", 13000); return OK; }
int cuInit(unsigned flags) { (void)flags; return setting("FAKE_DEVICES", 1) > 0 ? OK : NO_DEVICE; }
int cuDeviceGetCount(int* out) { *out = (int)setting("FAKE_DEVICES", 1); return OK; }
int cuDeviceGet(int* out, int i) { *out = i; return i < setting("FAKE_DEVICES", 1) ? OK : INVALID_DEVICE; }
int cuDeviceGetName(char* out, int len, int i) { snprintf(out, (size_t)len, "Fake %c", 'A' + i); return OK; }
int cuDeviceGetAttribute(int* out, int which, int device) {
    (void)device;
    long arch = setting("FAKE_ARCH", 90);
    switch (which) {
        case 75: *out = (int)(arch / 10); break;
        case 76: *out = (int)(arch % 10); break;
        case 16: *out = 132; break;
        case 36: *out = (int)setting("FAKE_CLOCK", 227 << 10); break;
        default: *out = 227 << 10; break;
    }
    return OK;
}
int cuDevicePrimaryCtxRetain(void** out, int device) { *out = (void*)(intptr_t)(device + 1); return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
int cuCtxSetCurrent(void* context) { (void)context; return OK; }
int cuMemGetInfo_v2(size_t* free_, size_t* total) {
    *total = (size_t)setting("FAKE_FREE", 8000000000);
    *free_ = *total - (size_t)taken;
    return OK;
}
// Bytes in front of an allocation, where its length stands.
enum { HEAD = 256 };
int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
    syncs();
    if (++n_allocs == setting("FAKE_ALLOC_FAILS", 0)) return OUT_OF_MEMORY;
    if (taken + (long)bytes > setting("FAKE_FREE", 8000000000)) return OUT_OF_MEMORY;
    char* at = calloc(HEAD + bytes + 256, 1);
    if (!at) return OUT_OF_MEMORY;
    *(size_t*)(void*)at = bytes;
    *out = (uint64_t)(uintptr_t)(at + HEAD);
    taken += (long)bytes;
    return OK;
}
int cuMemFree_v2(uint64_t at) {
    syncs();
    char* start = (char*)(uintptr_t)at - HEAD;
    taken -= (long)*(size_t*)(void*)start;
    free(start);
    return OK;
}
int cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    syncs();
    (void)flags;
    *out = malloc(bytes);
    return *out ? OK : OUT_OF_MEMORY;
}
int cuMemHostGetDevicePointer_v2(uint64_t* out, void* at, unsigned flags) {
    (void)flags;
    *out = (uint64_t)(uintptr_t)at;
    return OK;
}
int cuMemFreeHost(void* at) { syncs(); free(at); return OK; }
int cuStreamCreate(void** out, unsigned flags) { (void)flags; *out = malloc(1); return OK; }
int cuStreamDestroy_v2(void* stream) { free(stream); return OK; }
static int state(void) {
    long fault = setting("FAKE_LAUNCH_FAULTS", 0), lost = setting("FAKE_LOST", 0);
    if (fault && n_launches >= fault) sticky = FAULT;
    if (lost && n_waits >= lost) sticky = LOST;
    return sticky;
}
// The copiers of weights wait too, on several threads: a lost device counts the waits behind the first launch.
int cuStreamSynchronize(void* stream) { (void)stream; if (n_launches) n_waits++; return state(); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, void* s) {
    queues();
    (void)s;
    if (sticky) return sticky;
    memcpy((void*)(uintptr_t)to, from, n);
    return OK;
}
// What a faulty device copies back is no number that anybody may see.
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, void* s) {
    queues();
    (void)s;
    if (sticky) return sticky;
    if (setting("FAKE_LAUNCH_FAULTS", 0) && n_launches >= setting("FAKE_LAUNCH_FAULTS", 0)) memset(to, 0x3f, n);
    else memcpy(to, (void*)(uintptr_t)from, n);
    return OK;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void* s) {
    queues();
    (void)s;
    if (sticky) return sticky;
    memmove((void*)(uintptr_t)to, (void*)(uintptr_t)from, n);
    return OK;
}
int cuMemsetD8Async(uint64_t at, unsigned char value, size_t n, void* s) {
    queues();
    (void)s;
    if (sticky) return sticky;
    memset((void*)(uintptr_t)at, value, n);
    return OK;
}
// All is done as soon as it is queued, so that nothing is waited for: what a host answers comes too late and counts for
// nothing.
int cuStreamQuery(void* stream) { queues(); (void)stream; return state(); }
int cuStreamWriteValue32_v2(void* stream, uint64_t at, uint32_t value, unsigned flags) {
    queues();
    (void)stream; (void)flags;
    *(volatile uint32_t*)(uintptr_t)at = value;
    return OK;
}
int cuStreamWaitValue32_v2(void* stream, uint64_t at, uint32_t value, unsigned flags) {
    (void)stream; (void)flags;
    pthread_mutex_lock(&driver);
    int n = n_awaited < MOST_AWAITED ? n_awaited++ : n_awaited - 1;
    awaited[n].at = (volatile uint32_t*)(uintptr_t)at;
    awaited[n].value = value;
    is_idle();
    pthread_mutex_unlock(&driver);
    // Others get their turn before what follows is queued.
    if (setting("FAKE_SYNCS", 0)) usleep((unsigned)setting("FAKE_SYNCS", 0));
    return OK;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { (void)stream; (void)event; (void)flags; return OK; }
int cuEventCreate(void** out, unsigned flags) {
    (void)flags;
    *out = malloc(1);
    return setting("FAKE_EVENT_FAILS", 0) ? OUT_OF_MEMORY : OK;
}
int cuEventRecord(void* event, void* stream) { queues(); (void)event; (void)stream; return OK; }
int cuEventElapsedTime_v2(float* ms, void* from, void* to) { (void)from; (void)to; *ms = 1.0f; return OK; }
int cuEventDestroy_v2(void* event) { free(event); return OK; }
static void pick(const uint64_t* a) {
    uint32_t* out = (uint32_t*)(uintptr_t)a[5];
    uint32_t rows = ((const uint32_t*)(a + 7))[1];
    for (uint32_t i = 0; i < rows; i++, out += 134) {
        memset(out, 0, 134 * 4);
        out[2] = 1;
        out[3] = 0xffffffff;
        out[6] = (uint32_t)setting("FAKE_TOKEN", 300);
        out[70] = 0x41200000;
    }
}
int cuLaunchKernelEx(const Config* config, void* function, void** params, void** extra) {
    queues();
    (void)config; (void)extra;
    if (sticky) return sticky;
    if (is_capturing) { n_captured++; return OK; }
    n_launches++;
    if (strcmp(function, "pick_merge") == 0) pick(params[0]);
    return OK;
}
int cuStreamBeginCapture_v2(void* stream, int mode) {
  (void)stream; (void)mode; is_capturing = 1; n_captured = 0; return OK;
}
int cuStreamEndCapture(void* stream, void** graph) { (void)stream; is_capturing = 0; *graph = malloc(1); return OK; }
int cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long flags) {
    syncs();
    (void)graph; (void)flags;
    *out = malloc(sizeof(long));
    *(long*)*out = n_captured;
    return OK;
}
int cuGraphDestroy(void* graph) { free(graph); return OK; }
int cuGraphExecDestroy(void* graph) { syncs(); free(graph); return OK; }
int cuGraphLaunch(void* graph, void* stream) {
    (void)stream;
    queues();
    if (sticky) return sticky;
    n_launches += *(long*)graph;
    return OK;
}
int cuModuleLoadData(void** out, const void* image) {
    syncs();
    *out = malloc(1);
    // Of the fake compiler, or of the real one.
    return memcmp(image, "fake", 4) && memcmp(image, "\177ELF", 4) ? 200 : OK;
}
int cuModuleGetFunction(void** out, void* module, const char* name) {
    (void)module;
    syncs();
    *out = strdup(name);
    return OK;
}
int cuModuleUnload(void* module) { syncs(); free(module); return OK; }
int cuFuncGetAttribute(int* out, int which, void* function) { (void)which; (void)function; *out = 0; return OK; }
int cuFuncSetAttribute(void* function, int which, int value) { (void)function; (void)which; (void)value; return OK; }
#else
int nvrtcVersion(int* major, int* minor) { *major = (int)setting("FAKE_NVRTC", 13); *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int* n) { *n = 3; return 0; }
int nvrtcGetSupportedArchs(int* out) { out[0] = 80; out[1] = 89; out[2] = 90; return 0; }
int nvrtcCreateProgram(
    void** out, const char* source, const char* name, int n, const char* const* h, const char* const* i) {
    (void)source; (void)name; (void)n; (void)h; (void)i;
    *out = malloc(1);
    return 0;
}
int nvrtcCompileProgram(void* program, int n, const char* const* options) {
  (void)program; (void)n; (void)options; return 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* n) { (void)program; *n = 1; return 0; }
int nvrtcGetProgramLog(void* program, char* out) { (void)program; *out = 0; return 0; }
int nvrtcGetCUBINSize(void* program, size_t* n) { (void)program; *n = 5; return 0; }
int nvrtcGetCUBIN(void* program, char* out) { (void)program; memcpy(out, "fake", 5); return 0; }
int nvrtcGetPTXSize(void* program, size_t* n) { (void)program; *n = 5; return 0; }
int nvrtcGetPTX(void* program, char* out) { (void)program; memcpy(out, "fake", 5); return 0; }
int nvrtcDestroyProgram(void** program) { free(*program); return 0; }
#endif
