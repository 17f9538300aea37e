/* Preloaded, makes MKL inside libtorch_cpu take its paths for Intel CPUs on one of another maker. */
int mkl_serv_intel_cpu_true(void){return 1;}
int mkl_serv_intel_cpu(void){return 1;}
int mkl_serv_cpuiszen(void){return 0;}
