// SPDX-License-Identifier: Apache-2.0

package zmtp

// MaxQueued is maxQueued.
const MaxQueued = maxQueued

var (
	ErrProtocol = errProtocol
	NewConn     = newConn
)
