#include "emu.h"
#include SOURCE
#ifdef STATS
extern "C" void stats(unsigned grid, const char* q, const G* g, char* ws, const void* scale, const void* gamma, const void* beta, void* rm, void* rv, double* saved) {
    Problem p; memcpy(&p, q, sizeof p);
    launch(grid, [=] { scale_stats(p, g, ws, nullptr, scale, gamma, beta, rm, rv, nullptr, saved, nullptr); });
}
extern "C" int size() { return sizeof(Problem); }
#elif defined(NORM)
extern "C" void norm(unsigned grid, const char* q, const G* g, Y* y, const char* ws, D* d, const double* saved) {
    Problem p; memcpy(&p, q, sizeof p);
    launch(grid, [=] { normalize(p, g, y, ws, nullptr, d, saved); });
}
#else
extern "C" void sums(unsigned grid, const char* q, const T* dy, const D* d, const double* saved, char* ws) {
    Problem p; memcpy(&p, q, sizeof p);
    launch(grid, [=] { backward_sums(p, dy, d, saved, ws, nullptr); });
}
extern "C" void dgk(unsigned grid, const char* q, const T* dy, const D* d, const double* saved, const char* ws, T* dg, void* a, void* b, void* c, void* e) {
    Problem p; memcpy(&p, q, sizeof p);
    launch(grid, [=] { backward_dg(p, dy, d, saved, ws, dg, nullptr, a, b, c, e); });
}
#endif
