/* How threads share the work of a step. OpenMP makes the team; within it, work is handed out and waited for here, because a
   processor is rarely ours alone: OpenMP's barriers spin for milliseconds while the thread they wait for may stand in line
   behind them on the same core, and a fixed split waits for the slowest. Here each thread first takes its own contiguous
   share, item by item, then what others have left; and who waits gives way after about a microsecond. Which thread computes
   an item never changes its result. */
#if defined(_OPENMP)
#include <omp.h>
#endif
#if !defined(_WIN32)
#include <sched.h>
#endif
#include <time.h>

enum { MAX_THREADS = 256, SPINS = 128, LINE = 64 };

typedef struct { int64_t value; char padding[LINE - sizeof(int64_t)]; } Counter; /* alone in its cache line */
typedef struct { Counter arrived, phase, taken[MAX_THREADS]; } Team; /* starts as zeros */
typedef struct { Team *team; int64_t self, threads; double *seconds, since_s; } Member; /* seconds: where mark() adds, or NULL */

static int64_t num_threads(void) {
#if defined(_OPENMP)
    int64_t threads = omp_get_max_threads();
    return threads < MAX_THREADS ? threads : MAX_THREADS;
#else
    return 1;
#endif
}

/* Called by each thread of a parallel region of num_threads() or fewer. */
static Member join_team(Team *team) {
#if defined(_OPENMP)
    return (Member){team, omp_get_thread_num(), omp_get_num_threads(), 0, 0};
#else
    return (Member){team, 0, 1, 0, 0};
#endif
}

static void give_way(int *spins) {
    if (++*spins < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
        return;
    }
#if !defined(_WIN32)
    sched_yield();
#endif
}

/* The next of `count` items, or -1 when all are taken. Between two `wait`s all members ask for the same count. */
static int64_t take(const Member *m, int64_t count) {
    for (int64_t i = 0; i < m->threads; i++) {
        int64_t owner = (m->self + i) % m->threads, first = count * owner / m->threads, size = count * (owner + 1) / m->threads - first;
        int64_t *taken = &m->team->taken[owner].value;
        if (__atomic_load_n(taken, __ATOMIC_RELAXED) >= size) continue;
        int64_t item = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        if (item < size) return first + item;
    }
    return -1;
}

/* Until every member has come here; then there are new items to take. */
static void wait_for_team(const Member *m) {
    Team *t = m->team;
    int64_t phase = __atomic_load_n(&t->phase.value, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&t->arrived.value, 1, __ATOMIC_ACQ_REL) == m->threads) {
        for (int64_t i = 0; i < m->threads; i++) __atomic_store_n(&t->taken[i].value, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&t->arrived.value, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&t->phase.value, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&t->phase.value, __ATOMIC_ACQUIRE) == phase;) give_way(&spins);
}

#define FOR_TEAM(member, item, count) for (int64_t item; (item = take(member, count)) >= 0;)

static double now_s(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Begins to time the parts of a step, on one thread, if anybody asked. A part is what ends at its mark, its wait included. */
static void begin_marks(Member *m, double *seconds) {
    if (!seconds || m->self) return;
    m->seconds = seconds;
    m->since_s = now_s();
}

static void mark(Member *m, int part) {
    if (!m->seconds) return;
    double now = now_s();
    m->seconds[part] += now - m->since_s;
    m->since_s = now;
}
