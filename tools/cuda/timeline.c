// Memory that kernels and the host see at one fixed address, for `timeline.py`: a library that the driver loads into a
// program (CUDA_INJECTION64_PATH). It writes the memory to the file TIMELINE_OUT five times a second.
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define AT ((void*)0x600000000000ull)
#define BYTES (16u << 20)

static void* serve(void* none) {
    CUcontext context;
    CUdeviceptr device = 0;
    unsigned flags;
    int is_active = 0;
    while (cuDevicePrimaryCtxGetState(0, &flags, &is_active) || !is_active) usleep(200);
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    if (cuMemHostRegister(AT, BYTES, CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE) ||
        cuMemHostGetDevicePointer(&device, AT, 0) || device != (CUdeviceptr)AT) {
        fprintf(stderr, "timeline: the device does not see the host's memory at its address\n");
        exit(1);
    }
    const char* out = getenv("TIMELINE_OUT");
    char part[4096];
    snprintf(part, sizeof part, "%s.part", out);
    for (;;) {
        usleep(200000);
        FILE* file = fopen(part, "wb");
        if (!file) break;
        fwrite(AT, 1, BYTES, file);
        fclose(file);
        rename(part, out);
    }
    return none;
}

int InitializeInjection(void) {
    pthread_t thread;
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    return mmap(AT, BYTES, PROT_READ | PROT_WRITE, flags, -1, 0) == AT && !pthread_create(&thread, NULL, serve, NULL);
}
