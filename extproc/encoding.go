// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"slices"
	"strings"
)

// encodings reads the values of content-encoding: "" for none, or the name of the only one;
// "other" for an unknown one, or several. kvroute reads no compressed bodies: it routes them by load.
func encodings(values []string) string {
	names := strings.FieldsFunc(strings.ToLower(strings.Join(values, ",")), func(r rune) bool { return r == ',' || r == ' ' || r == '\t' })
	names = slices.DeleteFunc(names, func(name string) bool { return name == "identity" })
	switch {
	case len(names) == 0:
		return ""
	case len(names) == 1 && slices.Contains([]string{"gzip", "deflate", "br", "zstd"}, names[0]):
		return names[0]
	}
	return "other"
}
