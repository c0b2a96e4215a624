// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package process

import "syscall"

// OwnGroup keeps a terminal's Ctrl-C from a child, so that we can end it in our own
// order.
func OwnGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
