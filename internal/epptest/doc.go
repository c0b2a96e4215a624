// SPDX-License-Identifier: Apache-2.0

// Package epptest tests an endpoint picker from outside against the protocol of the
// Gateway API Inference Extension, proposal 004: any picker at an address.
//
//	go test ./internal/epptest -addr 127.0.0.1:9002 -model m -endpoints 10.0.0.1:8000,10.0.0.2:8000
//
// Without an address the tests start kvroute's own picker. The package consists of tests.
package epptest
