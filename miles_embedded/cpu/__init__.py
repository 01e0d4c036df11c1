"""Steps of a transformer layer in C, for a float32 model on a CPU; compiled on the machine they run on."""
