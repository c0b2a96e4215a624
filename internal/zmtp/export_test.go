// SPDX-License-Identifier: Apache-2.0

package zmtp

import "net"

var ErrProtocol = errProtocol

// NetConn is the connection below c.
func NetConn(c *Conn) net.Conn { return c.nc }
