from lab_finish import *
T = (65536, 1024, 1024)
P, X = dict(EXP_PREFETCH=1), dict(EXP_X=3)
pk = {"old": load(OLD, "g_old"),
 "x0": variant("x0"),
 "x3": variant("x3", **X),
 "x3_pre": variant("x3_pre", **P, **X),
 "x3_ll": variant("x3_ll", EXP_LIFO=1, EXP_LAST=1, **X),
 "x3_lls": variant("x3_lls", EXP_LIFO=1, EXP_LAST=1, EXP_SNAKE=1, **X),
 "x3_p1l": variant("x3_p1l", panel=1, EXP_LIFO=1, **X),
 "x3_p1lp": variant("x3_p1lp", panel=1, EXP_LIFO=1, **X, **P),
 "x3_u32": variant("x3_u32", EXP_UNIT=32, **X),
 "t_x0": variant("t_x0", EXP_TRACE=1),
 "t_x3": variant("t_x3", EXP_TRACE=1, **X),
 "t_x3_pre": variant("t_x3_pre", EXP_TRACE=1, **P, **X),
 "t_nostore": variant("t_nostore", EXP_TRACE=1, EXP_X=1),
 "t_noload": variant("t_noload", EXP_TRACE=1, EXP_X=2),
 "t_x3_p1l": variant("t_x3_p1l", EXP_TRACE=1, panel=1, EXP_LIFO=1, **X),
}
bench(T, "bfloat16", "highest", True, pk, rounds=9, nocheck=("t_nostore", "t_noload"))
for k in pk:
    if k.startswith("t_"): trace(pk[k], T, "bfloat16")
