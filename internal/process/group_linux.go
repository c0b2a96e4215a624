// SPDX-License-Identifier: Apache-2.0

package process

import "syscall"

// OwnGroup gives a child a process group of its own, so that a terminal's Ctrl-C does not
// reach it and the parent can end its children in order. The kernel kills the child when the
// parent dies.
func OwnGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
