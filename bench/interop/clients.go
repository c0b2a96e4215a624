// SPDX-License-Identifier: Apache-2.0

package main

// clientChecks ask through Envoy with clients that know nothing of kvroute.
func clientChecks() []check { return nil }
