// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"net/http"

	"github.com/kvroute/kvroute/envoy"
)

// ExamineEnvoy adds what the configuration of the Envoy at an admin endpoint lacks to use kvroute, or a note that it
// has all.
func (r *Report) ExamineEnvoy(ctx context.Context, client *http.Client, admin string) {
	dump, err := envoy.ReadDump(ctx, client, admin)
	var lacks []envoy.Finding
	if err == nil {
		lacks, err = envoy.Check(dump)
	}
	if err != nil {
		lacks = []envoy.Finding{{Text: "its configuration cannot be read: " + err.Error()}}
	} else if len(lacks) == 0 {
		lacks = []envoy.Finding{{Note: true, Text: "its configuration has all that kvroute needs"}}
	}
	for _, l := range lacks {
		f := Finding{Level: fault, What: "envoy", Of: admin, Text: "Envoy at " + admin + ": " + l.Text}
		if l.Note {
			f.Level = note
		}
		r.Findings = append(r.Findings, f)
	}
}
