// SPDX-License-Identifier: Apache-2.0

// Package replay plays a workload against simulated engines.
package replay
