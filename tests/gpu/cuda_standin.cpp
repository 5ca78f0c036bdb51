// The libcuda.so.1 of cupti_standin.cpp: a call of the driver API that its CUPTI records.
extern "C" int standin_driver_version(int *version);
extern "C" int cuDriverGetVersion(int *version) { return standin_driver_version(version); }
