// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package process

import "syscall"

// OwnGroup gives a child a process group of its own, so that a terminal's Ctrl-C does not
// reach it and the parent can end its children in order.
func OwnGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
