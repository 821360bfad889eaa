/* A file system without locks, as some NFS and Lustre mounts: every lock request fails with ENOLCK. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/file.h>

typedef int (*fcntl_function)(int, int, ...);

int flock(int descriptor, int operation) {
  (void)descriptor;
  (void)operation;
  errno = ENOLCK;
  return -1;
}

static int call(const char *name, int descriptor, int command, void *argument) {
  switch (command) {
  case F_SETLK:
  case F_SETLKW:
  case F_OFD_SETLK:
  case F_OFD_SETLKW:
    errno = ENOLCK;
    return -1;
  default:
    return ((fcntl_function)dlsym(RTLD_NEXT, name))(descriptor, command, argument);
  }
}

int fcntl(int descriptor, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void *argument = va_arg(arguments, void *);
  va_end(arguments);
  return call("fcntl", descriptor, command, argument);
}

int fcntl64(int descriptor, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void *argument = va_arg(arguments, void *);
  va_end(arguments);
  return call("fcntl64", descriptor, command, argument);
}
