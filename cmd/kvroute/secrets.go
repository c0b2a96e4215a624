// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"log/slog"
	"os"
)

// warnOfReaders logs each file with a secret, and the folder of the state, that all users of the machine can read or
// change. The folder has the password of the NATS server inside kvroute, and what workers cache.
func (c *config) warnOfReaders(log *slog.Logger) {
	const everybody fs.FileMode = 0o006
	for _, s := range []struct{ setting, path string }{
		{"api-token-file", c.APITokenFile},
		{"nats-creds", c.NATSCreds},
		{"nats-nkey", c.NATSNkey},
		{"nats-key", c.NATSKey},
		{"extproc-tls-key", c.ExtprocTLSKey},
		{"http-tls-key", c.HTTPTLSKey},
		{"state-dir", c.StateDir},
	} {
		if info, err := os.Stat(s.path); err == nil && info.Mode()&everybody != 0 {
			log.Warn("all users of this machine can read or change a path with secrets; remove their rights with chmod o-rwx",
				"setting", s.setting, "path", s.path, "mode", info.Mode().String())
		}
	}
}
