// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// Waits that are longer than Envoy's are refused: Envoy would go on without kvroute after message_timeout.
func TestWaitsThatEnvoyCutsAreRefused(t *testing.T) {
	t.Parallel()
	const queue = " --router-queue-threshold 1"
	for flags, want := range map[string]string{
		"":                              "",
		"--prefill-timeout 59.5s":       "",
		"--prefill-timeout 60s":         "prefill-timeout is too long",
		"--prefill-timeout 51s" + queue: "prefill-timeout is too long",
		"--queue-wait 29.5s" + queue:    "",
		"--queue-wait 30s" + queue:      "prefill-timeout is too long",
		"--queue-wait 59.5s --prefill-leg header" + queue:          "",
		"--queue-wait 60s --prefill-leg header" + queue:            "set envoy-max-message-timeout to 1m0.5s",
		"--prefill-timeout 2m --envoy-max-message-timeout 2m0.5s":  "",
		"--envoy-max-message-timeout 10s":                          "prefill-timeout is too long",
		"--prefill-timeout 2m --envoy-admin http://127.0.0.1:9901": "", // kvroute reads Envoy's own value
	} {
		_, _, err := readConfig("test", strings.Fields(flags), nil)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", flags, err, want)
		}
	}
}
