/* A CUDA runtime, driver and cuBLAS without a GPU, for LD_PRELOAD: see fake_cuda.py.

   Device memory is host memory. Copies from and to the host are made at once. Kernels and copies on the device do
   nothing: so a replay leaves what the plain step leaves. What is real are PyTorch's allocator, its graphs and its
   autograd, and the rules of stream capture that follow, as in "CUDA Runtime API, Stream Management":
     900  what waits for the device, or may, is called in a capture
     901  anything after an error in the same capture, and its end
     905  a stream of a capture waits for an event from outside
     906  the legacy stream would wait for an event of a capture
     907  an event of a capture is queried or waited for by the host
     908  a capture ends in another thread than it began, unless it is relaxed
   One capture at a time. An event or a stream of a capture makes each stream that waits for it join the capture. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define __CUDA_API_VERSION_INTERNAL
#include <driver_types.h>

typedef cudaError_t Error;
typedef unsigned long long Id;
enum { OUT_OF_MEMORY = 2, UNSUPPORTED = 900, INVALIDATED = 901, ISOLATION = 905, IMPLICIT = 906, CAPTURED = 907, THREAD = 908 };
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 }; /* modes of capture, of a thread and of a capture */
enum { NONE = 0, ACTIVE = 1, BROKEN = 2 };          /* states of a stream */
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, ON_DEVICE = 3 };
enum { MOST_STREAMS = 256, PAGE = 4096 };

/* ---- what tests read: fake_counts, in this order (fake_cuda.py) ---- */

static struct {
    long captures, ended, replays, launches, host_copies, errors, held, peak, page_locked, destroyed;
} count;

void fake_counts(long *out) { memcpy(out, &count, sizeof count); }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long total = 80L << 30;
static __thread Error last;

static Error fail(Error error, const char *what) {
    last = error;
    count.errors++;
    if (getenv("FAKE_CUDA_LOG")) fprintf(stderr, "fake CUDA: error %d in %s\n", error, what);
    return error;
}

static long limit(void) {
    const char *asked = getenv("FAKE_CUDA_BYTES");
    return asked ? atol(asked) : total;
}

/* ---- captures ---- */

typedef struct { Id capture; } Event;
typedef struct { long nodes; } Graph;

static struct {
    Id id;
    int is_active, is_broken, mode;
    pthread_t thread;
    void *streams[MOST_STREAMS];
    int joined;
    long nodes;
} capture;
static __thread int thread_mode = GLOBAL;

static int is_in(void *stream) {
    if (!capture.is_active) return 0;
    for (int i = 0; i < capture.joined; i++)
        if (capture.streams[i] == stream) return 1;
    return 0;
}

static int is_legacy(void *stream) { return (size_t)stream <= 2; }

static Error broken(Error error, const char *what) {
    capture.is_broken = 1;
    return fail(error, what);
}

/* An operation on a stream becomes a node, or is done at once. */
static Error node(void *stream, const char *what) {
    if (!is_in(stream)) return 0;
    if (capture.is_broken) return fail(INVALIDATED, what);
    capture.nodes++;
    return 0;
}

/* A call that may wait for the device is not allowed beside a capture, unless the modes allow it. */
static Error unsafe(const char *what) {
    if (!capture.is_active || thread_mode == RELAXED || capture.mode == RELAXED) return 0;
    int is_own = pthread_equal(capture.thread, pthread_self());
    if (is_own || (capture.mode == GLOBAL && thread_mode == GLOBAL)) return broken(UNSUPPORTED, what);
    return 0;
}

static Error waits(void *stream, const char *what) {
    if (is_in(stream)) return broken(UNSUPPORTED, what);
    return unsafe(what);
}

Error cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return 0;
}

Error cudaStreamBeginCapture(void *stream, int mode) {
    if (capture.is_active || is_legacy(stream)) return fail(UNSUPPORTED, "cudaStreamBeginCapture");
    capture.id++;
    capture.is_active = 1;
    capture.is_broken = 0;
    capture.mode = mode;
    capture.thread = pthread_self();
    capture.streams[0] = stream;
    capture.joined = 1;
    capture.nodes = 0;
    count.captures++;
    return 0;
}

Error cudaStreamEndCapture(void *stream, Graph **graph) {
    *graph = NULL;
    if (capture.mode != RELAXED && !pthread_equal(capture.thread, pthread_self())) return broken(THREAD, "cudaStreamEndCapture");
    capture.is_active = 0;
    if (capture.is_broken) return fail(INVALIDATED, "cudaStreamEndCapture");
    *graph = malloc(sizeof **graph);
    (*graph)->nodes = capture.nodes;
    count.ended++;
    return 0;
}

static int state(void *stream) {
    if (!is_in(stream)) return NONE;
    return capture.is_broken ? BROKEN : ACTIVE;
}

Error cudaStreamIsCapturing(void *stream, int *status) {
    *status = state(stream);
    return 0;
}

Error cudaStreamGetCaptureInfo_v2(void *stream, int *status, Id *id, void **graph, void *nodes, void *number) {
    *status = state(stream);
    if (id) *id = capture.id;
    return 0;
}

Error cudaGraphInstantiateWithFlags(Graph **made, Graph *graph, Id flags) {
    *made = malloc(sizeof **made);
    **made = *graph;
    return 0;
}

Error cudaGraphInstantiate(Graph **made, Graph *graph, Id flags) { return cudaGraphInstantiateWithFlags(made, graph, flags); }

Error cudaGraphGetNodes(Graph *graph, void *nodes, size_t *number) {
    *number = graph->nodes;
    return 0;
}

Error cudaGraphLaunch(Graph *graph, void *stream) {
    count.replays++;
    return node(stream, "cudaGraphLaunch");
}

Error cudaGraphDestroy(Graph *graph) {
    free(graph);
    return 0;
}

Error cudaGraphExecDestroy(Graph *graph) {
    count.destroyed++;
    free(graph);
    return 0;
}

/* ---- streams and events ---- */

Error cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    *stream = calloc(1, PAGE); /* no other stream gets its address: none is freed */
    return 0;
}

Error cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
Error cudaStreamDestroy(void *stream) { return 0; }

Error cudaStreamGetPriority(void *stream, int *priority) {
    *priority = 0;
    return 0;
}

Error cudaStreamSynchronize(void *stream) { return waits(stream, "cudaStreamSynchronize"); }
Error cudaStreamQuery(void *stream) { return waits(stream, "cudaStreamQuery"); }

Error cudaDeviceSynchronize(void) {
    if (capture.is_active) return broken(UNSUPPORTED, "cudaDeviceSynchronize");
    return 0;
}

Error cudaEventCreateWithFlags(Event **event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    return 0;
}

Error cudaEventCreate(Event **event) { return cudaEventCreateWithFlags(event, 0); }

Error cudaEventDestroy(Event *event) {
    free(event);
    return 0;
}

Error cudaEventRecord(Event *event, void *stream) {
    event->capture = is_in(stream) ? capture.id : 0;
    return node(stream, "cudaEventRecord");
}

Error cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }

static int is_captured(Event *event) { return capture.is_active && event->capture == capture.id; }

Error cudaEventQuery(Event *event) {
    if (is_captured(event)) return broken(CAPTURED, "cudaEventQuery");
    return unsafe("cudaEventQuery");
}

Error cudaEventSynchronize(Event *event) {
    if (is_captured(event)) return broken(CAPTURED, "cudaEventSynchronize");
    return unsafe("cudaEventSynchronize");
}

Error cudaEventElapsedTime(float *ms, void *begin, void *end) {
    *ms = 1;
    return 0;
}

Error cudaStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    if (is_in(stream)) {
        if (is_captured(event)) return node(stream, "cudaStreamWaitEvent");
        return broken(ISOLATION, "cudaStreamWaitEvent");
    }
    if (!is_captured(event)) return 0;
    if (is_legacy(stream)) return broken(IMPLICIT, "cudaStreamWaitEvent");
    if (capture.joined < MOST_STREAMS) capture.streams[capture.joined++] = stream;
    return 0;
}

Error cudaLaunchHostFunc(void *stream, void *function, void *data) { return node(stream, "cudaLaunchHostFunc"); }

/* ---- memory: of the device up to `limit`, counted from the request until it is freed ---- */

static Error take(long bytes) {
    pthread_mutex_lock(&lock);
    int fits = count.held + bytes <= limit();
    if (fits) count.held += bytes;
    if (count.held > count.peak) count.peak = count.held;
    pthread_mutex_unlock(&lock);
    if (fits) return 0;
    last = OUT_OF_MEMORY; /* PyTorch frees its cache and asks again: this is no fault */
    return OUT_OF_MEMORY;
}

static void give(long bytes) {
    pthread_mutex_lock(&lock);
    count.held -= bytes;
    pthread_mutex_unlock(&lock);
}

static void *map(size_t bytes) { /* zeros; pages that nobody touches cost nothing */
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

Error cudaMalloc(void **pointer, size_t bytes) {
    Error error = unsafe("cudaMalloc");
    if (error) return error;
    if (take(bytes)) return OUT_OF_MEMORY;
    long *memory = map(bytes + PAGE);
    *memory = bytes;
    *pointer = (char *)memory + PAGE;
    return 0;
}

Error cudaFree(void *pointer) {
    Error error = unsafe("cudaFree");
    if (error || !pointer) return error;
    long *memory = (long *)((char *)pointer - PAGE);
    give(*memory);
    munmap(memory, *memory + PAGE);
    return 0;
}

Error cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    Error error = unsafe("cudaHostAlloc");
    if (error) return error;
    long *memory = map(bytes + PAGE);
    *memory = bytes;
    count.page_locked += bytes;
    *pointer = (char *)memory + PAGE;
    return 0;
}

Error cudaFreeHost(void *pointer) {
    long *memory = (long *)((char *)pointer - PAGE);
    count.page_locked -= *memory;
    munmap(memory, *memory + PAGE);
    return 0;
}

Error cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    count.page_locked += bytes; /* for good: nobody here unregisters and asks again */
    return 0;
}

Error cudaHostUnregister(void *pointer) { return 0; }

Error cudaMemGetInfo(size_t *free_bytes, size_t *all) {
    *free_bytes = limit() - count.held;
    *all = limit();
    return 0;
}

Error cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    memset(found, 0, sizeof *found); /* of no device: PyTorch knows its own */
    return 0;
}

Error cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    if (is_in(stream)) {
        if (kind == HOST_TO_DEVICE || kind == DEVICE_TO_HOST) count.host_copies++;
        return node(stream, "cudaMemcpyAsync");
    }
    if (kind != ON_DEVICE) memcpy(to, from, bytes);
    return 0;
}

Error cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    Error error = unsafe("cudaMemcpy");
    if (!error) memcpy(to, from, bytes);
    return error;
}

Error cudaMemcpy2DAsync(char *to, size_t to_row, const char *from, size_t from_row, size_t width, size_t rows, int kind, void *stream) {
    if (is_in(stream)) return node(stream, "cudaMemcpy2DAsync");
    for (size_t row = 0; row < rows && kind != ON_DEVICE; row++) memcpy(to + row * to_row, from + row * from_row, width);
    return 0;
}

Error cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    if (is_in(stream)) return node(stream, "cudaMemsetAsync");
    memset(to, value, bytes);
    return 0;
}

Error cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }

/* The driver's virtual memory, which PyTorch's expandable segments use. */
int cuMemAddressReserve(void **pointer, size_t bytes, size_t alignment, Id address, Id flags) {
    *pointer = map(bytes);
    return 0;
}

int cuMemAddressFree(void *pointer, size_t bytes) { return munmap(pointer, bytes); }

int cuMemCreate(Id *handle, size_t bytes, const void *properties, Id flags) {
    *handle = bytes;
    return take(bytes);
}

int cuMemRelease(Id handle) {
    give(handle);
    return 0;
}

int cuDeviceGetAttribute(int *value, int name, int device) {
    *value = 0; /* no memory that other processes may use */
    return 0;
}

int cuMemMap(Id pointer, size_t bytes, size_t offset, Id handle, Id flags) { return 0; }
int cuMemUnmap(Id pointer, size_t bytes) { return 0; }
int cuMemSetAccess(Id pointer, size_t bytes, const void *access, size_t number) { return 0; }
int cuMemExportToShareableHandle(void *handle, Id memory, int type, Id flags) { return 1; }
int cuMemImportFromShareableHandle(Id *memory, void *handle, int type) { return 1; }
int cuMemsetD32Async(Id pointer, unsigned value, size_t number, void *stream) { return 1; }
int cuStreamWriteValue32(void *stream, Id pointer, unsigned value, unsigned flags) { return 1; }

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    *bytes = 2 << 20;
    return 0;
}

/* ---- the device: an H100 by its figures ---- */

Error cudaGetDeviceCount(int *number) {
    *number = 1;
    return 0;
}

Error cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

Error cudaSetDevice(int device) { return 0; }

static Error version(int *number) {
    *number = FAKE_CUDA_VERSION;
    return 0;
}

Error cudaDriverGetVersion(int *number) { return version(number); }
Error cudaRuntimeGetVersion(int *number) { return version(number); }

Error cudaGetDeviceProperties_v2(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "fake GPU");
    found->totalGlobalMem = limit();
    found->major = 9;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->l2CacheSize = 50 << 20;
    found->unifiedAddressing = 1;
    for (int axis = 0; axis < 3; axis++) {
        found->maxThreadsDim[axis] = 1024;
        found->maxGridSize[axis] = axis ? 65535 : 2147483647;
    }
    return 0;
}

Error cudaDeviceGetAttribute(int *value, int name, int device) {
    struct cudaDeviceProp all;
    cudaGetDeviceProperties_v2(&all, device);
    *value = 0;
    if (name == cudaDevAttrComputeCapabilityMajor) *value = all.major;
    if (name == cudaDevAttrMultiProcessorCount) *value = all.multiProcessorCount;
    if (name == cudaDevAttrMaxThreadsPerBlock) *value = all.maxThreadsPerBlock;
    if (name == cudaDevAttrWarpSize) *value = all.warpSize;
    if (name == cudaDevAttrMaxGridDimX) *value = all.maxGridSize[0];
    if (name == cudaDevAttrMaxSharedMemoryPerBlock) *value = all.sharedMemPerBlock;
    if (name == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = all.sharedMemPerBlockOptin;
    if (name == cudaDevAttrMaxSharedMemoryPerMultiprocessor) *value = all.sharedMemPerMultiprocessor;
    return 0;
}

Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

Error cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:01:00.0");
    return 0;
}

Error cudaDeviceCanAccessPeer(int *can, int device, int other) {
    *can = 0;
    return 0;
}

Error cudaGetLastError(void) {
    Error error = last;
    last = 0;
    return error;
}

Error cudaPeekAtLastError(void) { return last; }

const char *cudaGetErrorName(Error error) { return "cudaError"; }

const char *cudaGetErrorString(Error error) {
    switch ((int)error) {
    case OUT_OF_MEMORY: return "out of memory";
    case UNSUPPORTED: return "operation not permitted when stream is capturing";
    case INVALIDATED: return "operation failed due to a previous error during capture";
    case ISOLATION: return "dependency created on uncaptured work in another stream";
    case IMPLICIT: return "operation would make the legacy stream depend on a capturing blocking stream";
    case THREAD: return "operation not permitted in another thread than that of the capture";
    case CAPTURED: return "operation not permitted on an event last recorded in a capturing stream";
    }
    return "an error of the fake";
}

/* The driver's functions that PyTorch and Triton ask for. This library has the driver's name. */
static Error entry(const char *name, void **pointer, int *status) {
    *pointer = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *pointer == NULL;
    return 0;
}

Error cudaGetDriverEntryPoint(const char *name, void **pointer, Id flags, int *status) { return entry(name, pointer, status); }

Error cudaGetDriverEntryPointByVersion(const char *name, void **pointer, unsigned asked, Id flags, int *status) {
    return entry(name, pointer, status);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *is_active = 1;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &count;
    return 0;
}

int cuCtxSetCurrent(void *context) { return 0; }

int cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxGetCurrent(context); }

int cuGetErrorString(int error, const char **text) {
    *text = cudaGetErrorString(error);
    return 0;
}

/* ---- kernels ---- */

typedef struct { unsigned x, y, z; } Size;

static Error launch(void *stream) {
    count.launches++;
    return node(stream, "a kernel");
}

Error cudaLaunchKernel(const void *function, Size grid, Size block, void **given, size_t shared, void *stream) { return launch(stream); }
Error cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **given) { return launch(how->stream); }
Error cudaFuncSetAttribute(const void *function, int name, int value) { return 0; }

Error cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 90;
    return 0;
}

Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size, size_t shared, unsigned flags) {
    *blocks = 2;
    return 0;
}

Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    *blocks = 2;
    return 0;
}

/* cuBLAS: its kernels are nodes too. A handle is where its stream is kept. */
static int made(void **handle) {
    *handle = calloc(1, PAGE);
    return 0;
}

static int freed(void *handle) {
    free(handle);
    return 0;
}

int cublasCreate_v2(void **handle) { return made(handle); }
int cublasDestroy_v2(void *handle) { return freed(handle); }

int cublasSetStream_v2(void **handle, void *stream) {
    *handle = stream;
    return 0;
}

#define PRODUCT(name) int name(void **handle) { return launch(*handle) ? 13 : 0; }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutSetAttribute)

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasLtCreate(void **handle) { return made(handle); }
int cublasLtDestroy(void *handle) { return freed(handle); }
int cublasLtMatmulDescCreate(void **made_, int type, int scale) { return made(made_); }
int cublasLtMatmulDescDestroy(void *handle) { return freed(handle); }
int cublasLtMatmulPreferenceCreate(void **made_) { return made(made_); }
int cublasLtMatmulPreferenceDestroy(void *handle) { return freed(handle); }
int cublasLtMatrixLayoutCreate(void **made_, int type, Id rows, Id columns, long long leading) { return made(made_); }
int cublasLtMatrixLayoutDestroy(void *handle) { return freed(handle); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *how, void *a, void *b, void *c, void *d, void *wish, int asked, void *results, int *found) {
    memset(results, 0, 96); /* the size of a cublasLtMatmulHeuristicResult_t, whose state 0 is success */
    *found = 1;
    return 0;
}

int cublasLtMatmul(void *handle, void *how, const void *alpha, const void *a, void *ad, const void *b, void *bd, const void *beta,
                   const void *c, void *cd, void *d, void *dd, const void *algorithm, void *workspace, size_t bytes, void *stream) {
    return launch(stream) ? 13 : 0;
}
