/* Shifts the wall clock of a process by WALL_SHIFT_S seconds, as the variable says at its start.
 *
 * To be preloaded. Other clocks stay. A wait until an absolute wall time is shifted back, because
 * the kernel ends it by the true clock. Programs without libc (nats-server, etcd) are not reached.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

/* The same function of the next library, found when it is needed first. */
#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) \
        next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Absolute times above this are wall times: monotonic clocks begin with the boot. */
#define OLDEST_WALL_S 1000000000

static time_t shift_s;

__attribute__((constructor)) static void read_shift(void) {
    const char *said = getenv("WALL_SHIFT_S");
    shift_s = said ? atol(said) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int failed = next(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    NEXT(gettimeofday);
    int failed = next(now, zone);
    if (!failed)
        now->tv_sec += shift_s;
    return failed;
}

time_t time(time_t *result) {
    NEXT(time);
    time_t now = next(NULL) + shift_s;
    if (result)
        *result = now;
    return now;
}

int timespec_get(struct timespec *now, int base) {
    NEXT(timespec_get);
    int got = next(now, base);
    if (got == TIME_UTC)
        now->tv_sec += shift_s;
    return got;
}

static struct timespec true_time(const struct timespec *until) {
    struct timespec result = *until;
    if (result.tv_sec > OLDEST_WALL_S)
        result.tv_sec -= shift_s;
    return result;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    NEXT(sem_timedwait);
    struct timespec end = true_time(until);
    return next(semaphore, &end);
}

int pthread_cond_timedwait(
    pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static __typeof__(&pthread_cond_timedwait) next;
    if (!next) { /* Two versions of it may exist, and dlsym may find the older one. */
        next = (__typeof__(next))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        if (!next)
            next = (__typeof__(next))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    }
    struct timespec end = true_time(until);
    return next(condition, mutex, &end);
}
