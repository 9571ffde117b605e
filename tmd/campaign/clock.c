/* Shifts the wall clock of one process: by the nanoseconds that $TMD_CLOCK, a file, holds now. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static int (*inner)(clockid_t, struct timespec *);
static volatile int64_t *shift;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TMD_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    inner = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) shift = page;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int result = inner(which, now);
    if (result == 0 && which == CLOCK_REALTIME && shift) {
        int64_t all = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *shift;
        now->tv_sec = all / 1000000000;
        now->tv_nsec = all % 1000000000;
    }
    return result;
}
