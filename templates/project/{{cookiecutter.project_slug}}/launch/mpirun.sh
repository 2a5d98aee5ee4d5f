#!/usr/bin/env bash
# Trains under mpirun.
set -euo pipefail
