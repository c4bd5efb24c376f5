/* Records what a process does to the files below a directory: every call of the C library that changes, names, unnames
   or syncs one, in the order in which they were done. Preloaded by tests/file_operations.py, which reads the log.

   A lock is held around each call and its record, so that the order of the log is the order of the disk, whatever
   threads there are. What cannot be followed (maps that are written to, files without a name, ...) is recorded as
   "unsupported", and fails the test that reads it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { START, CREATE, MKDIR, WRITE, TRUNCATE, FSYNC, RENAME, LINK, UNLINK, RMDIR, MARK, UNSUPPORTED };

struct header {
  uint32_t kind, pid;
  uint64_t inode, offset, path, target, data; /* The last three: lengths of what follows. */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int log_descriptor = -1;
static char root[PATH_MAX];
static size_t root_length;
static int fatal_kind = -1, fatal_signal; /* The process gets this signal after the first call of this kind ... */
static char fatal_text[PATH_MAX]; /* ... of which a path contains this text, or ends with it if that ends with "$". */

static int is_fatal(const char *path) {
  size_t length = strlen(fatal_text);
  if (!path) return 0;
  if (!length || fatal_text[length - 1] != '$') return strstr(path, fatal_text) != NULL;
  return strlen(path) >= length - 1 && !strncmp(path + strlen(path) - length + 1, fatal_text, length - 1);
}

static void record(int kind, uint64_t inode, const char *path, const char *target, uint64_t offset, const void *data,
                   size_t length) {
  if (log_descriptor < 0) return;
  struct header header = {kind, getpid(), inode, offset, path ? strlen(path) : 0, target ? strlen(target) : 0, length};
  struct iovec parts[] = {{&header, sizeof header}, {(void *)path, header.path}, {(void *)target, header.target},
                          {(void *)data, length}};
  size_t whole = sizeof header + header.path + header.target + length;
  if (syscall(SYS_writev, log_descriptor, parts, 4) != (ssize_t)whole) {
    static const char complaint[] = "file_operations: the log cannot be written\n";
    syscall(SYS_write, 2, complaint, sizeof complaint - 1);
    abort();
  }
  if (kind == fatal_kind && (is_fatal(path) || is_fatal(target))) {
    fatal_kind = -1;
    kill(getpid(), fatal_signal);
    if (fatal_signal == SIGKILL) pause(); /* Nothing more is done. */
  }
}

/* Signals wait meanwhile: their handlers may write, too. */
static __thread sigset_t unblocked;

static void hold(void) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  pthread_mutex_lock(&mutex);
  unblocked = before;
}

static void release(void) {
  sigset_t before = unblocked;
  pthread_mutex_unlock(&mutex);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void prepare(void) {
  const char *log = getenv("FILE_OPERATIONS_LOG"), *directory = getenv("FILE_OPERATIONS_ROOT");
  struct stat status;
  if (!log || !directory || !realpath(directory, root) || stat(root, &status)) return;
  root_length = strlen(root);
  log_descriptor = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  record(START, status.st_ino, root, NULL, 0, NULL, 0);
  pthread_atfork(hold, release, release);
}

static void begin(void) {
  pthread_once(&once, prepare);
  hold();
}

static void end(void) {
  int kept = errno;
  release();
  errno = kept;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int below(const char *path) {
  return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path of a name whose last part is not followed where it is a link; 0 where it is not below the root. */
static int place(int directory, const char *name, char *out) {
  char raw[2 * PATH_MAX], link[64];
  ssize_t length = 0;
  if (log_descriptor < 0 || !name || !*name) return 0;
  if (name[0] != '/') {
    snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
    length = readlink(link, raw, PATH_MAX);
    if (length < 0) return 0;
    raw[length++] = '/';
  }
  snprintf(raw + length, sizeof raw - length, "%s", name);
  for (length = strlen(raw); length > 1 && raw[length - 1] == '/';) raw[--length] = 0;
  char *last = strrchr(raw, '/');
  if (!last) return 0;
  *last++ = 0;
  if (!realpath(*raw ? raw : "/", out)) return 0;
  length = strlen(out);
  snprintf(out + length, PATH_MAX - length, "/%s", last);
  return below(out);
}

/* The same of an open file or directory, with its status. */
static int opened(int descriptor, char *out, struct stat *status) {
  char link[64];
  if (log_descriptor < 0 || fstat(descriptor, status)) return 0;
  if (!S_ISREG(status->st_mode) && !S_ISDIR(status->st_mode)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, out, PATH_MAX - 1);
  if (length < 0) return 0;
  out[length] = 0;
  return below(out);
}

struct opening {
  char path[PATH_MAX];
  int ours, existed, flags;
  struct stat before;
};

static void before_open(struct opening *opening, int directory, const char *name, int flags) {
  begin();
  opening->flags = flags;
  opening->ours = (flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) && place(directory, name, opening->path);
  opening->existed = opening->ours && !lstat(opening->path, &opening->before);
}

static int after_open(struct opening *opening, int descriptor) {
  int kept = errno;
  struct stat after;
  if (descriptor >= 0 && opening->ours && !fstat(descriptor, &after)) {
    if ((opening->flags & O_TMPFILE) == O_TMPFILE || (opening->existed && S_ISLNK(opening->before.st_mode)))
      record(UNSUPPORTED, 0, opening->path, "open", 0, NULL, 0);
    else if (!opening->existed)
      record(CREATE, after.st_ino, opening->path, NULL, 0, NULL, 0);
    else if ((opening->flags & O_TRUNC) && opening->before.st_size)
      record(TRUNCATE, after.st_ino, opening->path, NULL, 0, NULL, 0);
  }
  errno = kept;
  end();
  return descriptor;
}

#define MODE \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list arguments; \
    va_start(arguments, flags); \
    mode = va_arg(arguments, mode_t); \
    va_end(arguments); \
  }
#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    MODE REAL(name); \
    struct opening opening; \
    before_open(&opening, AT_FDCWD, path, flags); \
    return after_open(&opening, real(path, flags, mode)); \
  }
#define OPENAT(name) \
  int name(int directory, const char *path, int flags, ...) { \
    MODE REAL(name); \
    struct opening opening; \
    before_open(&opening, directory, path, flags); \
    return after_open(&opening, real(directory, path, flags, mode)); \
  }
#define CHECKED_OPEN(name) /* What _FORTIFY_SOURCE makes of an open without a mode. */ \
  int name(const char *, int); \
  int name(const char *path, int flags) { \
    REAL(name); \
    struct opening opening; \
    before_open(&opening, AT_FDCWD, path, flags); \
    return after_open(&opening, real(path, flags)); \
  }
#define CHECKED_OPENAT(name) \
  int name(int, const char *, int); \
  int name(int directory, const char *path, int flags) { \
    REAL(name); \
    struct opening opening; \
    before_open(&opening, directory, path, flags); \
    return after_open(&opening, real(directory, path, flags)); \
  }
#define CREAT(name) \
  int name(const char *path, mode_t mode) { \
    REAL(name); \
    struct opening opening; \
    before_open(&opening, AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC); \
    return after_open(&opening, real(path, mode)); \
  }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) CREAT(creat) CREAT(creat64)
CHECKED_OPEN(__open_2) CHECKED_OPEN(__open64_2) CHECKED_OPENAT(__openat_2) CHECKED_OPENAT(__openat64_2)

/* The C library writes streams without calling a name that could be preloaded. */
#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(name); \
    char where[PATH_MAX]; \
    begin(); \
    if (strpbrk(mode, "wa+") && place(AT_FDCWD, path, where)) record(UNSUPPORTED, 0, where, "fopen", 0, NULL, 0); \
    FILE *file = real(path, mode); \
    end(); \
    return file; \
  }
FOPEN(fopen) FOPEN(fopen64)

/* The bytes were written at `offset`, or before where the file is now if that is negative. */
static void wrote(int descriptor, const struct iovec *parts, int count, ssize_t length, off64_t offset) {
  int kept = errno;
  char path[PATH_MAX];
  struct stat status;
  if (length > 0 && opened(descriptor, path, &status)) {
    char *data = malloc(length), *next = data;
    if (!data) abort();
    ssize_t left = length;
    for (int i = 0; i < count && left > 0; i++) {
      size_t part = (size_t)left < parts[i].iov_len ? (size_t)left : parts[i].iov_len;
      memcpy(next, parts[i].iov_base, part);
      next += part;
      left -= part;
    }
    if (offset < 0) offset = lseek64(descriptor, 0, SEEK_CUR) - length;
    record(WRITE, status.st_ino, path, NULL, offset, data, length);
    free(data);
  }
  errno = kept;
}

ssize_t write(int descriptor, const void *data, size_t length) {
  REAL(write);
  begin();
  ssize_t done = real(descriptor, data, length);
  struct iovec part = {(void *)data, length};
  wrote(descriptor, &part, 1, done, -1);
  end();
  return done;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
  REAL(writev);
  begin();
  ssize_t done = real(descriptor, parts, count);
  wrote(descriptor, parts, count, done, -1);
  end();
  return done;
}

#define PWRITE(name, offset_type) \
  ssize_t name(int descriptor, const void *data, size_t length, offset_type offset) { \
    REAL(name); \
    begin(); \
    ssize_t done = real(descriptor, data, length, offset); \
    struct iovec part = {(void *)data, length}; \
    wrote(descriptor, &part, 1, done, offset); \
    end(); \
    return done; \
  }
PWRITE(pwrite, off_t) PWRITE(pwrite64, off64_t)

#define PWRITEV(name, offset_type) \
  ssize_t name(int descriptor, const struct iovec *parts, int count, offset_type offset) { \
    REAL(name); \
    begin(); \
    ssize_t done = real(descriptor, parts, count, offset); \
    wrote(descriptor, parts, count, done, offset); \
    end(); \
    return done; \
  }
PWRITEV(pwritev, off_t) PWRITEV(pwritev64, off64_t)

static void unsupported(int descriptor, const char *call) {
  int kept = errno;
  char path[PATH_MAX];
  struct stat status;
  if (opened(descriptor, path, &status)) record(UNSUPPORTED, status.st_ino, path, call, 0, NULL, 0);
  errno = kept;
}

#define PWRITEV2(name, offset_type) \
  ssize_t name(int descriptor, const struct iovec *parts, int count, offset_type offset, int flags) { \
    REAL(name); \
    begin(); \
    ssize_t done = real(descriptor, parts, count, offset, flags); \
    if (flags) unsupported(descriptor, #name); \
    wrote(descriptor, parts, count, done, offset); \
    end(); \
    return done; \
  }
PWRITEV2(pwritev2, off_t) PWRITEV2(pwritev64v2, off64_t)

/* What the kernel has copied is read again. */
static void copied(int descriptor, ssize_t length, off64_t offset) {
  int kept = errno;
  char link[64], path[PATH_MAX];
  struct stat status;
  if (length > 0 && opened(descriptor, path, &status)) {
    char *data = malloc(length);
    if (offset < 0) offset = lseek64(descriptor, 0, SEEK_CUR) - length;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int reader = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
    if (!data || pread64(reader, data, length, offset) != length) abort();
    syscall(SYS_close, reader);
    struct iovec part = {data, length};
    wrote(descriptor, &part, 1, length, offset);
    free(data);
  }
  errno = kept;
}

#define SENDFILE(name, offset_type) \
  ssize_t name(int out, int in, offset_type *offset, size_t length) { \
    REAL(name); \
    begin(); \
    ssize_t done = real(out, in, offset, length); \
    copied(out, done, -1); \
    end(); \
    return done; \
  }
SENDFILE(sendfile, off_t) SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags) {
  REAL(copy_file_range);
  begin();
  off64_t start = to ? *to : -1;
  ssize_t done = real(in, from, out, to, length, flags);
  copied(out, done, start);
  end();
  return done;
}

ssize_t splice(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags) {
  REAL(splice);
  begin();
  ssize_t done = real(in, from, out, to, length, flags);
  unsupported(out, "splice");
  end();
  return done;
}

#define FALLOCATE(name, declaration, call) \
  int name declaration { \
    REAL(name); \
    begin(); \
    int done = real call; \
    unsupported(descriptor, #name); \
    end(); \
    return done; \
  }
FALLOCATE(fallocate, (int descriptor, int mode, off_t offset, off_t length), (descriptor, mode, offset, length))
FALLOCATE(fallocate64, (int descriptor, int mode, off64_t offset, off64_t length), (descriptor, mode, offset, length))
FALLOCATE(posix_fallocate, (int descriptor, off_t offset, off_t length), (descriptor, offset, length))
FALLOCATE(posix_fallocate64, (int descriptor, off64_t offset, off64_t length), (descriptor, offset, length))

#define MMAP(name, offset_type) \
  void *name(void *address, size_t length, int protection, int flags, int descriptor, offset_type offset) { \
    REAL(name); \
    if (descriptor < 0 || !(protection & PROT_WRITE) || (flags & MAP_TYPE) == MAP_PRIVATE) \
      return real(address, length, protection, flags, descriptor, offset); \
    begin(); \
    void *done = real(address, length, protection, flags, descriptor, offset); \
    unsupported(descriptor, #name); \
    end(); \
    return done; \
  }
MMAP(mmap, off_t) MMAP(mmap64, off64_t)

#define FTRUNCATE(name, size_type) \
  int name(int descriptor, size_type size) { \
    REAL(name); \
    char path[PATH_MAX]; \
    struct stat status; \
    begin(); \
    int done = real(descriptor, size); \
    if (!done && opened(descriptor, path, &status)) record(TRUNCATE, status.st_ino, path, NULL, size, NULL, 0); \
    end(); \
    return done; \
  }
FTRUNCATE(ftruncate, off_t) FTRUNCATE(ftruncate64, off64_t)

#define TRUNCATE_PATH(name, size_type) \
  int name(const char *path, size_type size) { \
    REAL(name); \
    char where[PATH_MAX]; \
    struct stat status; \
    begin(); \
    int done = real(path, size); \
    if (!done && place(AT_FDCWD, path, where) && !stat(where, &status)) \
      record(TRUNCATE, status.st_ino, where, NULL, size, NULL, 0); \
    end(); \
    return done; \
  }
TRUNCATE_PATH(truncate, off_t) TRUNCATE_PATH(truncate64, off64_t)

#define SYNC(name) \
  int name(int descriptor) { \
    REAL(name); \
    char path[PATH_MAX]; \
    struct stat status; \
    begin(); \
    int done = real(descriptor); \
    if (!done && opened(descriptor, path, &status)) record(FSYNC, status.st_ino, path, NULL, 0, NULL, 0); \
    end(); \
    return done; \
  }
SYNC(fsync) SYNC(fdatasync)

/* The calls that give and take names. */
static int two_names(int kind, int done, int from_below, const char *from, int to_below, const char *to) {
  int kept = errno;
  struct stat status;
  if (!done && (from_below || to_below)) {
    if (from_below != to_below || lstat(to, &status))
      record(UNSUPPORTED, 0, from_below ? from : to, "a name from outside", 0, NULL, 0);
    else
      record(kind, status.st_ino, from, to, 0, NULL, 0);
  }
  errno = kept;
  end();
  return done;
}

#define TWO_NAMES(kind, name, declaration, from_directory, to_directory, call) \
  int name declaration { \
    REAL(name); \
    char source[PATH_MAX], target[PATH_MAX]; \
    begin(); \
    int from_below = place(from_directory, from, source), to_below = place(to_directory, to, target); \
    return two_names(kind, real call, from_below, source, to_below, target); \
  }
TWO_NAMES(RENAME, rename, (const char *from, const char *to), AT_FDCWD, AT_FDCWD, (from, to))
TWO_NAMES(RENAME, renameat, (int source_at, const char *from, int target_at, const char *to), source_at, target_at,
          (source_at, from, target_at, to))
TWO_NAMES(LINK, link, (const char *from, const char *to), AT_FDCWD, AT_FDCWD, (from, to))
TWO_NAMES(LINK, linkat, (int source_at, const char *from, int target_at, const char *to, int flags), source_at,
          target_at, (source_at, from, target_at, to, flags))

int renameat2(int source_at, const char *from, int target_at, const char *to, unsigned flags) {
  REAL(renameat2);
  char source[PATH_MAX], target[PATH_MAX];
  begin();
  int from_below = place(source_at, from, source), to_below = place(target_at, to, target);
  int done = real(source_at, from, target_at, to, flags);
  return two_names(flags & RENAME_EXCHANGE ? UNSUPPORTED : RENAME, done, from_below, source, to_below, target);
}

#define ONE_NAME(name, declaration, at, call, kind_before) \
  int name declaration { \
    REAL(name); \
    char where[PATH_MAX]; \
    struct stat status; \
    begin(); \
    int ours = place(at, path, where), kind = kind_before; \
    int done = real call; \
    int kept = errno; \
    if (!done && ours) { \
      status.st_ino = 0; \
      if (kind == MKDIR || kind == UNSUPPORTED) lstat(where, &status); \
      record(kind, status.st_ino, where, #name, 0, NULL, 0); \
    } \
    errno = kept; \
    end(); \
    return done; \
  }
ONE_NAME(mkdir, (const char *path, mode_t mode), AT_FDCWD, (path, mode), MKDIR)
ONE_NAME(mkdirat, (int at, const char *path, mode_t mode), at, (at, path, mode), MKDIR)
ONE_NAME(unlink, (const char *path), AT_FDCWD, (path), UNLINK)
ONE_NAME(unlinkat, (int at, const char *path, int flags), at, (at, path, flags), flags & AT_REMOVEDIR ? RMDIR : UNLINK)
ONE_NAME(rmdir, (const char *path), AT_FDCWD, (path), RMDIR)
ONE_NAME(remove, (const char *path), AT_FDCWD, (path),
         !lstat(where, &status) && S_ISDIR(status.st_mode) ? RMDIR : UNLINK)
ONE_NAME(symlink, (const char *to, const char *path), AT_FDCWD, (to, path), UNSUPPORTED)
ONE_NAME(symlinkat, (const char *to, int at, const char *path), at, (to, at, path), UNSUPPORTED)

/* For the program itself: where it is to end, and what it knows at this point. */
void file_operations_signal_at(int number, int kind, const char *text);
void file_operations_signal_at(int number, int kind, const char *text) {
  begin();
  fatal_signal = number;
  fatal_kind = kind;
  snprintf(fatal_text, sizeof fatal_text, "%s", text);
  end();
}

void file_operations_mark(const char *text);
void file_operations_mark(const char *text) {
  begin();
  record(MARK, 0, text, NULL, 0, NULL, 0);
  end();
}
