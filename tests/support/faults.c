// A library for LD_PRELOAD that fails chosen calls on chosen files, as a disk that hiccups does.
//
// faults_plan(kinds, part, first, times, number): of the calls of these kinds on files whose path contains `part`, the calls
// number `first` to `first + times - 1` fail with the error `number`. faults_seen() returns how many such calls there were.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, LOCK = 4, SYNC = 8, RENAME = 16, OPEN = 32 };

static int kinds, number;
static long first, times;
static char part[4096];
static atomic_long seen;

void faults_plan(int which, const char *path_part, long from, long count, int error) {
    kinds = 0;
    snprintf(part, sizeof part, "%s", path_part);
    first = from;
    times = count;
    number = error;
    atomic_store(&seen, 0);
    kinds = which;
}

long faults_seen(void) { return atomic_load(&seen); }

static int fails(int kind, const char *path) {
    if (!(kinds & kind) || path == NULL || strstr(path, part) == NULL) return 0;
    if (kind != LOCK && strstr(path, ".lock") != NULL) return 0;  // tests/unit/test_lock.py writes to locks
    long call = atomic_fetch_add(&seen, 1);
    if (call < first || call >= first + times) return 0;
    errno = number;
    return 1;
}

static int fails_at(int kind, int file) {
    if (!(kinds & kind)) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return fails(kind, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name)                                                             \
    int name(const char *path, int flags, ...) {                                \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        mode_t mode = va_arg(rest, mode_t);                                     \
        va_end(rest);                                                           \
        return fails(OPEN, path) ? -1 : NEXT(name)(path, flags, mode);          \
    }
OPENS(open)
OPENS(open64)

ssize_t read(int file, void *data, size_t size) { return fails_at(READ, file) ? -1 : NEXT(read)(file, data, size); }
ssize_t pread(int file, void *data, size_t size, off_t at) {
    return fails_at(READ, file) ? -1 : NEXT(pread)(file, data, size, at);
}
ssize_t pread64(int file, void *data, size_t size, off64_t at) {
    return fails_at(READ, file) ? -1 : NEXT(pread64)(file, data, size, at);
}
ssize_t write(int file, const void *data, size_t size) {
    return fails_at(WRITE, file) ? -1 : NEXT(write)(file, data, size);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return fails_at(WRITE, file) ? -1 : NEXT(pwrite)(file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return fails_at(WRITE, file) ? -1 : NEXT(pwrite64)(file, data, size, at);
}
int flock(int file, int operation) { return fails_at(LOCK, file) ? -1 : NEXT(flock)(file, operation); }
int fsync(int file) { return fails_at(SYNC, file) ? -1 : NEXT(fsync)(file); }
int fdatasync(int file) { return fails_at(SYNC, file) ? -1 : NEXT(fdatasync)(file); }
int rename(const char *from, const char *to) { return fails(RENAME, to) ? -1 : NEXT(rename)(from, to); }
