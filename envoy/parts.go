// SPDX-License-Identifier: Apache-2.0

package envoy

import (
	"fmt"
	"strings"
)

// part is a place in an Envoy configuration, and the fields of the bootstrap that belong there.
type part struct {
	name, place string
	fields      []string
}

// parts are in the order in which a reader adds them. The first line of the bootstrap with such a name begins the
// field.
//
//nolint:gochecknoglobals // a table
var parts = []part{
	{
		"bootstrap", "Top level of the bootstrap. If you have layered_runtime, add the entries of static_layer to yours.",
		[]string{"cluster_manager", "layered_runtime"},
	},
	{"http_connection_manager", "typed_config of the HttpConnectionManager in the listener of your clients.", []string{
		"preserve_external_request_id", "normalize_path", "merge_slashes", "path_with_escaped_slashes_action",
		"stream_idle_timeout", "common_http_protocol_options", "early_header_mutation_extensions",
	}},
	{"http_filters", "http_filters there: behind your filters for authentication, rate limits and CORS. The router is the last one;\n" +
		"# if yours has a configuration, add upstream_log to it.", []string{"http_filters"}},
	{"virtual_host", "Virtual host of your models. The routes come before all others that match the same paths.", []string{
		"request_body_buffer_limit", "request_headers_to_remove", "response_headers_to_add", "routes",
	}},
	{"clusters", "clusters.", []string{"clusters"}},
}

// writeParts returns those pieces of a bootstrap that add kvroute to another configuration.
func writeParts(bootstrap string) (string, error) {
	lines := strings.Split(bootstrap, "\n")
	var out strings.Builder
	out.WriteString("# Pieces of an Envoy configuration, written by `kvroute config envoy --parts`. Each one has a name of its own here;\n" +
		"# the comment above says where its content belongs. docs/existing-envoy.md has the steps.\n")
	for i, p := range parts {
		fmt.Fprintf(&out, "\n# %d. %s\n%s:\n", i+1, p.place, p.name)
		for _, field := range p.fields {
			piece := fieldOf(lines, field)
			switch {
			case piece == nil && field == "cluster_manager": // without silence-timeout
				continue
			case piece == nil:
				return "", fmt.Errorf("envoy: the bootstrap has no field %s", field)
			case len(p.fields) == 1: // a list: the name of the part is that of the field
				piece = piece[1:]
			}
			for _, line := range piece {
				fmt.Fprintf(&out, "  %s\n", line)
			}
		}
	}
	return out.String(), nil
}

// fieldOf returns the lines of the first field with a name, and the comment above it, without their indentation.
func fieldOf(lines []string, name string) (piece []string) {
	for i, line := range lines {
		rest := strings.TrimLeft(line, " ")
		if !strings.HasPrefix(rest, name+":") {
			continue
		}
		indent := line[:len(line)-len(rest)]
		inside := func(l string) bool {
			rest, found := strings.CutPrefix(l, indent)
			return found && rest != "" && strings.ContainsRune(" -#", rune(rest[0]))
		}
		from, to := i, i+1
		for to < len(lines) && inside(lines[to]) {
			to++
		}
		for strings.HasPrefix(strings.TrimLeft(lines[to-1], " "), "#") { // the comment of the next field
			to--
		}
		for from > 0 && strings.HasPrefix(lines[from-1], indent+"#") {
			from--
		}
		for _, l := range lines[from:to] {
			piece = append(piece, strings.TrimPrefix(l, indent))
		}
		return piece
	}
	return nil
}
