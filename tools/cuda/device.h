// Memory and launches for `products.cpp` on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                                 \
    do {                                                                                            \
        const cudaError_t error = (call);                                                           \
        if (error != cudaSuccess) {                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)), exit(1); \
        }                                                                                           \
    } while (0)

// Memory that the host and the device see.
template <class T>
struct Managed {
    typedef T value_type;
    Managed() = default;
    template <class U>
    Managed(const Managed<U>&) {}
    T* allocate(size_t n) {
        void* p = nullptr;
        CHECK(cudaMallocManaged(&p, n * sizeof(T) + 16));
        return (T*)p;
    }
    void deallocate(T* p, size_t) { cudaFree(p); }
    template <class U>
    bool operator==(const Managed<U>&) const {
        return true;
    }
    template <class U>
    bool operator!=(const Managed<U>&) const {
        return false;
    }
};
template <class T>
using Array = std::vector<T, Managed<T>>;
static bool descending;

// With programmatic dependent launch, as the backend queues it.
template <class Args, class Given>
void queue(dim3 grid, unsigned block, unsigned n_shared, void (*kernel)(Args), const Given& args, cudaStream_t stream) {
    CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, n_shared));
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid, config.blockDim = dim3(block), config.dynamicSmemBytes = n_shared, config.stream = stream;
    config.attrs = attribute, config.numAttrs = 1;
    void* list[] = {(void*)&args};
    CHECK(cudaLaunchKernelExC(&config, (const void*)kernel, list));
}

template <class Args, class Given>
void launch(dim3 grid, unsigned block, unsigned n_shared, void (*kernel)(Args), const Given& args) {
    queue(grid, block, n_shared, kernel, args, nullptr);
    CHECK(cudaDeviceSynchronize());
}
