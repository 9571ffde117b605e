/* An NVML of our own, scripted by the file that NVML_SHIM names, which every call reads again.
 * Lines "key value"; keys: count, <gpu>.<fact>, [<gpu>.]<function>.ret, [<gpu>.]<function>.delay
 * (seconds or inf). A function that is not here is one that an old driver lacks.
 * Events come from the named pipe of that name with ".events": "gpu type data instance", 64 bytes each. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned field, scope; long long at, latency; int type, ret; unsigned long long value; } Field;
typedef struct { void *gpu; unsigned long long type, data; unsigned instance, compute; } Event;
typedef struct { unsigned version; unsigned long long counts[11]; unsigned exceeded; } Sram;
typedef struct { unsigned version; int degrees; } Margin;

static const char *look(const char *key) {
    static char line[256];
    FILE *script = fopen(getenv("NVML_SHIM"), "r");
    size_t n = strlen(key);
    const char *found = NULL;
    while (script && !found && fgets(line, sizeof line, script)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, key, n) && line[n] == ' ') found = line + n + 1;
    }
    if (script) fclose(script);
    return found;
}

static const char *of(long gpu, const char *name, const char *what) {
    char key[128];
    snprintf(key, sizeof key, "%ld.%s%s", gpu, name, what);
    const char *found = gpu >= 0 ? look(key) : NULL;
    if (found) return found;
    snprintf(key, sizeof key, "%s%s", name, what);
    return look(key);
}

static unsigned long long fact(long gpu, const char *name, unsigned long long otherwise) {
    const char *found = of(gpu, name, "");
    return found ? strtoull(found, NULL, 0) : otherwise;
}

static int enter(long gpu, const char *function) {
    const char *delay = of(gpu, function, ".delay");
    if (delay && !strcmp(delay, "inf")) for (;;) pause();
    if (delay) usleep((useconds_t)(atof(delay) * 1e6));
    const char *ret = of(gpu, function, ".ret");
    return ret ? atoi(ret) : 0;
}

#define GPU(handle) ((long)(handle) - 1)
#define ENTER(gpu) do { int ret = enter(gpu, __func__); if (ret) return ret; } while (0)
#define FACT(function, type, name, otherwise) \
    int function(void *h, type *out) { ENTER(GPU(h)); *out = (type)fact(GPU(h), name, otherwise); return 0; }

int nvmlInitWithFlags(unsigned flags) { ENTER(-1); return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int ret) { return "scripted"; }
int nvmlDeviceGetCount_v2(unsigned *n) { ENTER(-1); *n = (unsigned)fact(-1, "count", 0); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { ENTER(i); *h = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *h, char *uuid, unsigned n) {
    ENTER(GPU(h)); snprintf(uuid, n, "GPU-%ld", GPU(h)); return 0;
}
int nvmlDeviceGetPciInfo_v3(void *h, Pci *pci) {
    ENTER(GPU(h)); memset(pci, 0, sizeof *pci); pci->bus = 0x3b + (unsigned)GPU(h); return 0;
}
int nvmlDeviceGetFieldValues(void *h, int n, Field *fields) {
    ENTER(GPU(h));
    for (int i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "field%u", fields[i].field);
        const char *found = of(GPU(h), name, "");
        fields[i].type = found && *found == '-' ? 5 : 1;  /* a signed or an unsigned int */
        fields[i].ret = found ? 0 : 3;
        fields[i].value = found ? strtoull(found, NULL, 0) : 0;
    }
    return 0;
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
    ENTER(GPU(h));
    *c = *u = 0; *pending = (unsigned)fact(GPU(h), "pending", 0); *failed = (unsigned)fact(GPU(h), "failed", 0);
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int counter, unsigned long long *n) {
    ENTER(GPU(h)); *n = kind == 1 && counter == 0 ? fact(GPU(h), "ecc", 0) : 99; return 0;
}
int nvmlDeviceGetSramEccErrorStatus(void *h, Sram *sram) {
    ENTER(GPU(h)); sram->exceeded = (unsigned)fact(GPU(h), "sram", 0); return 0;
}
FACT(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "reasons", 0)
FACT(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "width", 16)
FACT(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "max_width", 16)
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *t) {
    ENTER(GPU(h)); *t = (unsigned)fact(GPU(h), "temperature", 40); return 0;
}
int nvmlDeviceGetTemperatureThreshold(void *h, int kind, unsigned *t) {
    ENTER(GPU(h)); *t = kind == 1 ? 90 : 95; return 0;
}
int nvmlDeviceGetMarginTemperature(void *h, Margin *margin) {
    ENTER(GPU(h));
    const char *found = of(GPU(h), "margin", "");
    if (!found) return 3;
    margin->degrees = atoi(found);
    return 0;
}
int nvmlDeviceGetNvLinkState(void *h, unsigned link, unsigned *up) {
    ENTER(GPU(h));
    char name[16];
    snprintf(name, sizeof name, "link%u", link);
    const char *found = of(GPU(h), name, "");
    if (!found) return 3;
    *up = (unsigned)atoi(found);
    return 0;
}
int nvmlEventSetCreate(void **set) { ENTER(-1); *set = (void *)1; return 0; }
int nvmlDeviceGetSupportedEventTypes(void *h, unsigned long long *types) {
    ENTER(GPU(h)); *types = fact(GPU(h), "events", 0x1f); return 0;
}
int nvmlDeviceRegisterEvents(void *h, unsigned long long types, void *set) {
    ENTER(GPU(h)); return types & ~fact(GPU(h), "events", 0x1f) ? 3 : 0;
}
int nvmlEventSetWait_v2(void *set, Event *event, unsigned ms) {
    static int pipe = -1;
    ENTER(-1);
    char name[256], told[64];
    snprintf(name, sizeof name, "%s.events", getenv("NVML_SHIM"));
    if (pipe < 0) pipe = open(name, O_RDWR | O_NONBLOCK);
    struct pollfd ready = {pipe, POLLIN, 0};
    if (poll(&ready, 1, (int)ms) < 1 || read(pipe, told, sizeof told) != sizeof told) return 10;
    long gpu;
    event->compute = -1u;
    if (sscanf(told, "%ld %llu %llu %u", &gpu, &event->type, &event->data, &event->instance) != 4) return 999;
    event->gpu = (void *)(gpu + 1);
    return 0;
}
