// SPDX-License-Identifier: Apache-2.0

package process

import "syscall"

// OwnGroup keeps a terminal's Ctrl-C from a child, so that we can end it in our own
// order, and lets it die with us even if we are killed.
func OwnGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
