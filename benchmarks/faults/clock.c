// A wall clock that a benchmark can step: the processes that load this library (LD_PRELOAD) read the kernel's clock plus
// the nanoseconds in a file. A wait until a time of the wall clock is told to the kernel by the kernel's clock; one that
// runs when the clock is stepped is left as it is.
//
// Nothing here allocates memory: an allocator may read the clock before it can serve.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef const struct timespec *Until;

static const int64_t SECOND = 1000000000;
static const volatile int64_t *step;

static int (*cond_wait)(pthread_cond_t *, pthread_mutex_t *, Until);
static int (*cond_clock_wait)(pthread_cond_t *, pthread_mutex_t *, clockid_t, Until);
static int (*mutex_lock)(pthread_mutex_t *, Until);
static int (*sem_wait_until)(sem_t *, Until);
static int (*sem_clock_wait)(sem_t *, clockid_t, Until);

// The C library's function of this kind is taken below.
static long to_kernel(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result >= -4095 && result < 0) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("INFLIGHT_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    cond_wait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    cond_clock_wait = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    mutex_lock = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    sem_wait_until = dlsym(RTLD_NEXT, "sem_timedwait");
    sem_clock_wait = dlsym(RTLD_NEXT, "sem_clockwait");
    void *mapped = mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) step = mapped;
}

static int is_stepped(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

static struct timespec moved(struct timespec at, int64_t by) {
    int64_t time = at.tv_sec * SECOND + at.tv_nsec + by;
    if (time < 0) time = 0;
    return (struct timespec){time / SECOND, time % SECOND};
}

static struct timespec for_kernel(Until until) { return moved(*until, step ? -*step : 0); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)to_kernel(SYS_clock_gettime, clock, (long)now, 0, 0, 0, 0);
    if (result == 0 && step && is_stepped(clock)) *now = moved(*now, *step);
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    *now = (struct timeval){at.tv_sec, at.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now) *now = at.tv_sec;
    return at.tv_sec;
}

int clock_nanosleep(clockid_t clock, int flags, Until until, struct timespec *left) {
    struct timespec at = flags & TIMER_ABSTIME && is_stepped(clock) ? for_kernel(until) : *until;
    return to_kernel(SYS_clock_nanosleep, clock, flags, (long)&at, (long)left, 0, 0) ? errno : 0;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, Until until) {
    int monotonic = cond->__data.__wrefs & 2; // glibc's own mark of the clock
    struct timespec at = monotonic ? *until : for_kernel(until);
    return cond_wait(cond, mutex, &at);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, Until until) {
    struct timespec at = is_stepped(clock) ? for_kernel(until) : *until;
    return cond_clock_wait(cond, mutex, clock, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, Until until) {
    struct timespec at = for_kernel(until);
    return mutex_lock(mutex, &at);
}

int sem_timedwait(sem_t *semaphore, Until until) {
    struct timespec at = for_kernel(until);
    return sem_wait_until(semaphore, &at);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, Until until) {
    struct timespec at = is_stepped(clock) ? for_kernel(until) : *until;
    return sem_clock_wait(semaphore, clock, &at);
}

long stepped_syscall(long, long, long, long, long, long, long) __asm__("syscall");
long stepped_syscall(long number, long a, long b, long c, long d, long e, long f) {
    struct timespec at;
    int command = (int)(b & FUTEX_CMD_MASK);
    if (number == SYS_futex && b & FUTEX_CLOCK_REALTIME && command == FUTEX_WAIT_BITSET && d) {
        at = for_kernel((Until)d);
        d = (long)&at;
    }
    return to_kernel(number, a, b, c, d, e, f);
}
