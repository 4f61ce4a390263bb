import numpy as np
rng=np.random.default_rng(0)
VEC=8; LANES=32
def place(C,row,piece): return row*C+(piece ^ ((row>>1&3) if C==4 else (row&7)))
def ldm(sm,rows_addr,trans):  # sm: array[piece][8]; rows_addr[lane] piece index ; returns a[lane][4] pairs
    out=np.zeros((32,4,2))
    for mi in range(4):
        M=np.stack([sm[rows_addr[mi*8+r]] for r in range(8)])  # 8x8
        if trans: M=M.T
        for l in range(32): out[l,mi]=M[l//4,2*(l%4):2*(l%4)+2]
    return out
def mma(a,b0,b1,c):
    A=np.zeros((16,16));B=np.zeros((16,8));
    for l in range(32):
        g,t=l//4,l%4
        A[g,2*t:2*t+2]=a[l,0];A[g+8,2*t:2*t+2]=a[l,1];A[g,2*t+8:2*t+10]=a[l,2];A[g+8,2*t+8:2*t+10]=a[l,3]
        B[2*t:2*t+2,g]=b0[l];B[2*t+8:2*t+10,g]=b1[l]
    C=A@B
    for l in range(32):
        g,t=l//4,l%4
        c[l]+= [C[g,2*t],C[g,2*t+1],C[g+8,2*t],C[g+8,2*t+1]]
def input_of(q,j): return 4*VEC*(j//VEC)+VEC*q+j%VEC
for F in (32,64):
  for I in (32,64):
    OD,OX=F//VEC,I//VEC; ROWS=32
    dg=rng.standard_normal((ROWS,F)); x=rng.standard_normal((ROWS,I)); W=rng.standard_normal((F,I))
    sd=np.zeros((ROWS*OD,8)); sx=np.zeros((ROWS*OX,8))
    for r in range(ROWS):
        for p in range(OD): sd[place(OD,r,p)]=dg[r,p*8:p*8+8]
        for p in range(OX): sx[place(OX,r,p)]=x[r,p*8:p*8+8]
    laid=np.full(F*I,np.nan)
    for i in range(F*I):
        f,k=i//I,i%I
        of=k%(4*VEC); eight=k//(4*VEC)*(VEC//2)+of%VEC//2
        lane=(of//VEC*2+of%2)*4+f%8//2
        laid[((f//16*(I//8)+eight)*LANES+lane)*4+f%16//8*2+f%2]=W[f,k]
    assert not np.isnan(laid).any()
    lu=laid.reshape(-1,4)
    dx=np.zeros((ROWS,I)); dw=np.zeros((F//16,I//8,32,4))
    for half in range(2):
        sums=np.zeros((I//8,32,4))
        for step in range(F//16):
            a=ldm(sd,[place(OD,half*16+l%16,2*step+l//16) for l in range(32)],False)
            for e in range(I//8):
                b=np.stack([lu[(step*(I//8)+e)*LANES+l] for l in range(32)])
                mma(a,b[:,:2],b[:,2:],sums[e])
        for l in range(32):
            for i in range(2):
                row=half*16+l//4+8*i
                for j in range(I//4):
                    dx[row,input_of(l%4,j)]=sums[j//2][l][2*i+j%2]
        b=[ldm(sx,[place(OX,half*16+l%16,2*i+l//16) for l in range(32)],True) for i in range(I//16)]
        for i in range(F//16):
            a=ldm(sd,[place(OD,half*16+l//16*8+l%8,2*i+l//8%2) for l in range(32)],True)
            for j in range(I//8):
                mma(a,b[j//2][:,j%2*2],b[j//2][:,j%2*2+1],dw[i,j])
    out=np.zeros((F,I))
    for l in range(32):
        for i in range(F//16):
            for j in range(I//8):
                for h in range(4): out[i*16+l//4+h//2*8, j*8+l%4*2+h%2]=dw[i,j,l,h]
    print(F,I,np.abs(dx-dg@W).max(),np.abs(out-dg.T@x).max())
# FMA
VEC=4
def input4(q,j): return 16*(j//4)+4*q+j%4
for F in (32,64):
  for I in (32,64):
    OD,OX=F//4,I//4; ROWS=16; FS,KS=F//8,I//4
    dg=rng.standard_normal((ROWS,F)); x=rng.standard_normal((ROWS,I)); W=rng.standard_normal((F,I))
    sd=np.zeros((ROWS*OD,4)); sx=np.zeros((ROWS*OX,4))
    for r in range(ROWS):
        for p in range(OD): sd[place(OD,r,p)]=dg[r,p*4:p*4+4]
        for p in range(OX): sx[place(OX,r,p)]=x[r,p*4:p*4+4]
    w=W.reshape(-1)
    dx=np.full((ROWS,I),np.nan); out=np.full((F,I),np.nan)
    for l in range(32):
        f0,k0=l//4,l%4
        s=np.zeros((2,KS))
        for p in range(OD):
            a=[sd[place(OD,f0+8*i,p)] for i in range(2)]
            for q in range(4):
                for j in range(0,KS,4):
                    b=w[(p*4+q)*I+input4(k0,j):(p*4+q)*I+input4(k0,j)+4]
                    for i in range(2): s[i,j:j+4]+=a[i][q]*b
        for i in range(2):
            for j in range(KS): dx[f0+8*i,input4(k0,j)]=s[i,j]
        acc=np.zeros((FS,KS))
        for r in range(ROWS):
            b=np.concatenate([sx[place(OX,r,k0+4*j)] for j in range(KS//4)])
            for i in range(FS//4):
                a=sd[place(OD,r,f0+8*i)]
                for q in range(4): acc[4*i+q]+=a[q]*b
        for i in range(FS):
            for j in range(KS): out[i//4*32+l//4*4+i%4, j//4*16+l%4*4+j%4]=acc[i,j]
    print(F,I,np.abs(dx-dg@W).max(),np.abs(out-dg.T@x).max())
