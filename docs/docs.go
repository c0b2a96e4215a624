// SPDX-License-Identifier: Apache-2.0

// Package docs has the documents that kvroute serves.
package docs

import _ "embed" // for the document

// OpenAPI describes the HTTP API, in OpenAPI 3.1.
//
//go:embed openapi.yaml
var OpenAPI []byte
