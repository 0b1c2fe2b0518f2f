// Short programs: what the threads of a warp and of a block do together, and what ptxas calls for.
typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
#define K(name) extern "C" __global__ void name(const int* x, int* y, const float* f, float* g, int n)
#define T int t = threadIdx.x + blockIdx.x * blockDim.x
K(votes){ T; int v=x[t]; y[4*t]=__ballot_sync(~0u,v&1); y[4*t+1]=__any_sync(~0u,v>50)+2*__all_sync(~0u,v<90); y[4*t+2]=__match_any_sync(~0u,v&3); int p; y[4*t+3]=__match_all_sync(~0u,v>>20,&p)+p; }
K(reduces){ T; int v=x[t]; y[8*t]=__reduce_add_sync(~0u,v); y[8*t+1]=__reduce_min_sync(~0u,v); y[8*t+2]=__reduce_max_sync(~0u,(u32)v); y[8*t+3]=__reduce_and_sync(~0u,v);y[8*t+4]=__reduce_or_sync(~0u,v);y[8*t+5]=__reduce_xor_sync(~0u,v); y[8*t+6]=__reduce_max_sync(~0u,v); y[8*t+7]=__reduce_min_sync(~0u,(u32)v);}
K(shuffles){ T; int v=x[t]; y[8*t]=__shfl_sync(~0u,v,(t*7)&31); y[8*t+1]=__shfl_up_sync(~0u,v,3); y[8*t+2]=__shfl_down_sync(~0u,v,5); y[8*t+3]=__shfl_xor_sync(~0u,v,9); y[8*t+4]=__shfl_sync(~0u,v,3,8); y[8*t+5]=__shfl_up_sync(~0u,v,1,4); y[8*t+6]=__shfl_down_sync(~0u,v,2,16); y[8*t+7]=__shfl_sync(~0u,v,t&31); }
K(diverge){ T; int v=x[t], s=0; for(int i=0;i<(v&15);i++){ if(i%3==(t%3)) s+=i*v; else if (i&1) s^=v; if(s>1000000) break; } if(t&1){ s+=__shfl_xor_sync(0xaaaaaaaau,v,2);} else { s+=__shfl_xor_sync(0x55555555u,v,4);} __syncwarp(); y[t]=s; }
K(switches){ T; int v=x[t], r; switch(v&7){case 0:r=v*3;break;case 1:r=v+t;break;case 2:r=v/7;break;case 3:r=~v;break;case 4:r=v<<3;break;case 5:r=v%11;break;case 6:r=__popc(v);break;default:r=v*v;} y[t]=r; }
__device__ int fa(int a){return a*3+1;} __device__ int fb(int a){return a^0x55;} __device__ int fc(int a){return a/3;}
typedef int (*F)(int); __device__ F table[3]={fa,fb,fc};
__device__ __noinline__ int rec(int a,int d){ return d<=0?a:rec(a*3+d,d-1)+d; }
K(recursion){ T; y[t]=rec(x[t],(x[t]&7)); }
K(locals){ T; int a[32]; for(int i=0;i<32;i++) a[i]=x[(t+i)%n]; int s=0; for(int i=0;i<32;i++) s+=a[(x[t]+i*5)&31]*(i+1); y[t]=s; }
__constant__ int cc[16]={1,2,3,5,8,13,21,34,55,89,144,233,377,610,987,1597};
__device__ int counter; __device__ int init[4]={7,8,9,10};
K(constants){ T; y[t]=cc[x[t]&15]+init[x[t]&3]; atomicAdd(&counter,1); }
K(generic){ __shared__ int s[64]; T; s[threadIdx.x%64]=x[t]; __syncthreads(); int l[4]={t,t+1,t+2,t+3}; l[x[t]&3]+=5; const int* p= (x[t]&4)? (const int*)s+(x[t]&31) : ((x[t]&8)? x+(t^1) : (const int*)l+(x[t]&3)); y[t]=*p; }
K(satomics){ __shared__ int s[8]; __shared__ float sf[2]; __shared__ u64 sl[2]; if(threadIdx.x<8) s[threadIdx.x]= threadIdx.x==2?0x7fffffff:threadIdx.x==3?-1:0; if(threadIdx.x<2){sf[threadIdx.x]=0;sl[threadIdx.x]=0;} __syncthreads(); T; int v=x[t]; atomicAdd(s+0,v); atomicMax(s+1,v); atomicMin(s+2,v); atomicAnd(s+3,v|0xff); atomicOr(s+4,v); atomicXor(s+5,v); int o=atomicAdd(s+6,1); atomicCAS(s+7,0,1); atomicAdd(sf,(float)(v&7)); atomicAdd(sl,(u64)(u32)v); __syncthreads(); if(threadIdx.x<8) y[threadIdx.x]=s[threadIdx.x]; if(threadIdx.x==0){ g[0]=sf[0]; y[8]=(int)sl[0]; y[9]=(int)(sl[0]>>32);} y[16+t]=o; }
K(gatomics){ T; int v=x[t]; atomicAdd(y,v); atomicMax(y+1,v); atomicMin(y+2,v); atomicAnd(y+3,v|0xff0000); atomicOr(y+4,v); atomicXor(y+5,v); atomicInc((u32*)y+6,5); atomicDec((u32*)y+7,9); atomicExch(y+8,123); int o=atomicAdd(y+9,2); atomicAdd(g,(float)(v&7)); atomicAdd((double*)(g+2),(double)(v&3)); atomicAdd((u64*)(y+10),(u64)(u32)v); int old=y[12],as; do{as=old; old=atomicCAS(y+12,as,as+3);}while(as!=old); y[32+t]=o; }
K(counts){ T; int a=__syncthreads_count(x[t]&1), b=__syncthreads_and(x[t]<100), c=__syncthreads_or(x[t]==-5); y[t]=a+1000*b+10000*c; }
K(mathf){ T; float v=f[t]; float* o=g+20*t; o[0]=expf(v);o[1]=logf(fabsf(v)+.1f);o[2]=sinf(v);o[3]=cosf(v*100);o[4]=tanhf(v);o[5]=powf(fabsf(v),1.7f);o[6]=erff(v);o[7]=atan2f(v,2.f);o[8]=cbrtf(v);o[9]=rsqrtf(fabsf(v)+1);o[10]=fmodf(v*37,1.3f);o[11]=exp2f(v*20);o[12]=log2f(fabsf(v)+1);o[13]=__expf(v);o[14]=__sinf(v);o[15]=log1pf(fabsf(v));o[16]=sinf(v*1e6f);o[17]=tgammaf(fabsf(v)+1);o[18]=rintf(v*10);o[19]=v/3.7f; }
K(mathd){ T; double v=f[t]; double* o=(double*)g+8*t; o[0]=exp(v);o[1]=log(fabs(v)+.1);o[2]=sin(v*50);o[3]=pow(fabs(v),1.7);o[4]=tanh(v);o[5]=sqrt(fabs(v))/(v*v+.3);o[6]=fma(v,v,-v);o[7]=fmod(v*37,1.3)+floor(v*3)+fmin(v,0.2)+(v>0?1:0); }
K(early){ T; if(t%5==0) return; int v=x[t]; v+=__shfl_down_sync(__activemask(),v,1)*0; __syncthreads(); y[t]=v; }
K(bytes_){ T; const signed char* c=(const signed char*)x; const unsigned short* h=(const unsigned short*)x; y[t]=c[t]*3+h[t]+((const short*)x)[t]+((const unsigned char*)x)[t+1]; ((signed char*)g)[t]=(signed char)x[t]; ((short*)(g+256))[t]=(short)x[t]; ((int2*)(g+512))[t]=make_int2(x[t],t); ((int4*)(g+2048))[t]=make_int4(t,x[t],t+1,x[t]+1); }
K(halves){ T; int v=x[t],w=x[(t+1)%n]; y[4*t]=__vadd2(v,w)^__vmaxs2(v,w); y[4*t+1]=__sad(v,w,5)+__usad(v,w,1)+__hadd(v,w)+__mul24(v,w);  y[4*t+3]=max(min(v,100),-100)+max(max(v,w),t)+min(v+w,7); }
