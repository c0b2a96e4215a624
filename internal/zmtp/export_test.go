// SPDX-License-Identifier: Apache-2.0

package zmtp

var ErrProtocol = errProtocol
