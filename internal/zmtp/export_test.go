// SPDX-License-Identifier: Apache-2.0

package zmtp

// What the tests use.
const MaxQueued = maxQueued

var (
	ErrProtocol = errProtocol
	NewConn     = newConn
)
